"""Theorem 3.3: SGD among the minimizers of a loss, against the flow that lowers the Hessian's trace along them."""
