"""Does SGD drift to flat minimizers (Theorem 3.3) in a model of my own?

The data are counts y ~ Poisson(r); the model has the rate exp(a b) and the loss exp(a b) - y a b. At its minimizers,
a b = log r and the trace of the Hessian is r (a^2 + b^2). `isoloss theory 3.3` does the same for the models that come
with isoloss.
"""

from dataclasses import dataclass

import numpy as np

from isoloss.paper.theory.sgd_flow import Settings, mean, study
from isoloss.statistics.estimate import rounded


@dataclass(frozen=True)
class Counts:
    rate: float
    start: float  # a; b follows

    name, unit, block = "counts", "nats per example", 4096  # trajectories that move together

    @property
    def minimizer(self):
        return np.array([self.start, np.log(self.rate) / self.start])

    @property
    def beside(self):  # where the control without label noise starts
        return self.minimizer[None] + [[0.0, 0.2]]

    def move(self, theta, step_size, *, batch_size, generator, exact):
        answers = self.rate if exact else generator.poisson(self.rate * batch_size, len(theta)) / batch_size
        slope = step_size * (np.exp(theta.prod(axis=1)) - answers)
        theta -= slope[:, None] * theta[:, ::-1].copy()

    def trace(self, theta):
        return np.exp(theta.prod(axis=1)) * (theta**2).sum(axis=1)

    def flow(self, time):  # -grad Tr multiplies D = a^2 - b^2 by exp(-4 r t) and leaves a b as it is
        (a, b), product = self.minimizer, np.log(self.rate)
        difference = (a * a - b * b) * np.exp(-4 * self.rate * time)
        larger = np.sqrt((np.hypot(difference, 2 * product) + difference) / 2)
        return np.array([larger, product / larger])

    def reached(self, theta):
        a, b = self.minimizer
        differences = theta[:, 0] ** 2 - theta[:, 1] ** 2
        return mean(-np.log(differences / (a * a - b * b)) / (4 * self.rate), "", "by a^2 - b^2")


model, sizes = Counts(rate=1.5, start=1.2), (0.05, 0.035, 0.025)
settings = Settings(model=model, step_sizes=sizes, times=(0.25, 0.5), trajectories=16384)
result = study(settings)
for statement in result.statements:
    print(f"{'shown' if statement.shown else 'not shown'}: {statement.text}")
for row in result.limits[1::2]:  # at the later time, extrapolated to step size 0
    found = rounded(-row.coefficient.value / row.batch_size, row.coefficient.stderr / row.batch_size)
    print(f"B = {row.batch_size}: SGD follows {found} times grad Tr; the theorem has {-1 / (4 * row.batch_size):.4f}")
