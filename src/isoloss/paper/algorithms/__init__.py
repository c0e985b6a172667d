"""The study of what the pre-training algorithms do: the paper's tables 1 and 2 on a laptop, over several seeds."""
