"""The study brackets: does a flatter model transfer better where the paper's theory says so?"""
