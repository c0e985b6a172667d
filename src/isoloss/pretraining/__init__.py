"""Pre-training: the loop knows no algorithm, an algorithm knows no loop, and a killed run goes on bit for bit."""

from isoloss.pretraining.adversary import Examples
from isoloss.pretraining.clock import Progress
from isoloss.pretraining.loop import Interrupted, train

__all__ = ["Examples", "Interrupted", "Progress", "train"]
