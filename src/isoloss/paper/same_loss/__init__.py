"""The study of the paper's sections 2 and 4: models of the same loss that differ in flatness and in transfer."""
