"""Pre-training: the loop knows no algorithm, an algorithm knows no loop, and a killed run goes on bit for bit."""
