"""The pendulum that swings up: its dynamics, policy iteration on a model of them, simulated runs.

The system of Deisenroth et al. (2009) as section 5.1 of Grünewälder et al. (2012) states it: states
(theta, omega), the angle from the upright position in [-pi, pi] and the angular velocity in
[-7, 7]; a torque in [-5, 5] Nm, which does not suffice for a direct swing-up; reward
exp(-theta^2 - omega^2 / 5). What a model learns has four inputs (sine and cosine of the angle,
velocity, torque) and three outputs (sine, cosine and velocity a time step later).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse
from scipy.sparse.linalg import spsolve

from cme_dask.cli.compute import prepare_folder
from cme_dask.data.atomic import disk_errors, of_format, writing
from cme_dask.data.columns import Columns

Array = Any
Outputs = Callable[[Array], Array]
"""E[Y | x] of rows of inputs (n, 4), shape (n, 3)."""

COLUMNS = Columns(("sin", "cos", "omega", "torque")), Columns(("sin'", "cos'", "omega'"))
TRANSITIONS = "transitions.parquet"
TORQUE, SPEED = 5.0, 7.0  # Nm, rad/s: largest ones
STEP = 0.2  # s, during which the torque is constant
ACTIONS = np.linspace(-TORQUE, TORQUE, 11)
DISCOUNT = 0.98
SUCCESS = (
    "The pendulum starts hanging, within 0.3 rad and 0.3 rad/s of rest, and is steered for 10 s; a "
    "start is a success if the angle stays within 0.35 rad of upright during all of the last 3 s."
)
"""Definition of success, written before the runs."""

_MASS, _LENGTH, _FRICTION, _GRAVITY = 1.0, 1.0, 0.05, 9.81  # kg, m, kg m^2 / s, m / s^2
_SUBSTEPS = 10  # of Runge and Kutta, for each time step
_START, _UPRIGHT, _SECONDS, _LAST = 0.3, 0.35, 10.0, 3.0
_GRID = 48, 41  # angles, velocities
_ITERATIONS = 40
_BATCH = 1 << 16


def advance(states: Array, torques: Array) -> Array:
    """The states (n, 2) a time step later, by the method of Runge and Kutta."""

    def slope(values: Array) -> Array:
        turning = _MASS * _GRAVITY * _LENGTH * np.sin(values[:, 0]) + torques
        gain = (turning - _FRICTION * values[:, 1]) / (_MASS * _LENGTH**2)
        return np.stack([values[:, 1], gain], axis=1)

    h = STEP / _SUBSTEPS
    for _ in range(_SUBSTEPS):
        k1 = slope(states)
        k2 = slope(states + h / 2 * k1)
        k3 = slope(states + h / 2 * k2)
        states = states + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(states + h * k3))
    angle = (states[:, 0] + np.pi) % (2 * np.pi) - np.pi
    return np.stack([angle, np.clip(states[:, 1], -SPEED, SPEED)], axis=1)


def features(states: Array) -> Array:
    """Sine and cosine of the angle and the velocity, shape (n, 3)."""
    return np.stack([np.sin(states[:, 0]), np.cos(states[:, 0]), states[:, 1]], axis=1)


def reward(outputs: Array) -> Array:
    """exp(-theta^2 - omega^2 / 5) of rows of features, shape (n,)."""
    return np.exp(-(np.arctan2(outputs[:, 0], outputs[:, 1]) ** 2) - 0.2 * outputs[:, 2] ** 2)


def transitions(rows: int, seed: int) -> tuple[Array, Array]:
    """Uniform states and torques, and what follows: inputs (n, 4) and outputs (n, 3)."""
    x, y = zip(*batches(rows, seed), strict=True)
    return np.concatenate(x), np.concatenate(y)


def batches(rows: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """The same in batches; batch i has a generator of its own."""
    for number, start in enumerate(range(0, rows, _BATCH)):
        rng = np.random.default_rng([seed, number])
        shape = min(_BATCH, rows - start)
        states = rng.uniform(-1.0, 1.0, (shape, 2)) * [np.pi, SPEED]
        torques = rng.uniform(-TORQUE, TORQUE, shape)
        yield (
            np.column_stack([features(states), torques]),
            features(advance(states, torques)),
        )


def write_transitions(folder: Path, rows: int, *, overwrite: bool) -> dict[str, Any]:
    """Write ``transitions.parquet``, the table that the job ``pendulum`` reads."""
    (x, y), path = COLUMNS, folder / TRANSITIONS
    prepare_folder(folder, (TRANSITIONS,), overwrite)
    schema = pa.schema([(name, pa.float64()) for name in (*x.names, *y.names)])
    with (
        disk_errors(path),
        writing(path, of_format(TRANSITIONS), overwrite=overwrite) as aside,
        pq.ParquetWriter(aside, schema) as writer,
    ):
        for inputs, outputs in batches(rows, 0):
            writer.write_table(pa.table([*np.hstack([inputs, outputs]).T], schema=schema))
    return {"file": str(path), "rows": rows}


def true_outputs(inputs: Array) -> Array:
    """The outputs themselves, in the place of a model's."""
    states = np.stack([np.arctan2(inputs[:, 0], inputs[:, 1]), inputs[:, 2]], axis=1)
    return features(advance(states, inputs[:, 3]))


# Policy iteration: values at the nodes of a grid of states


@dataclass(frozen=True, eq=False)
class Policy:
    """What policy iteration has learnt with a model.

    Attributes
    ----------
    outputs
        The model's E[Y | x].
    values
        Discounted return from each node of the grid of states.
    iterations
        Improvements of the policy until none was left.
    seconds
        Of the model's answers at all nodes and torques, and of each iteration on average.
    """

    outputs: Outputs
    values: Array
    iterations: int
    seconds: tuple[float, float]

    def torques(self, states: Array) -> Array:
        """The torque with the largest expected return, shape (n,)."""
        return ACTIONS[_returns(_answers(self.outputs, states), self.values).argmax(axis=0)]


def policy_iteration(outputs: Outputs) -> Policy:
    """Evaluate and improve a policy until it stays.

    The dynamics have no noise: the law of Y given x is a point, which the model estimates by its
    mean. Values there are a mean of those at four nodes of the grid. The value that is backed up at
    all nodes is thus the product of a stochastic matrix of transitions, one for each torque, with
    the values; a policy's values solve a sparse linear system.
    """
    begin = time.perf_counter()
    nodes = _nodes()
    answers = _answers(outputs, nodes)
    answered = time.perf_counter()
    matrices = [_weights(after) for after in answers]
    rewards = np.stack([reward(after) for after in answers])
    every = np.arange(len(nodes))
    policy = rewards.argmax(axis=0)
    for steps in range(1, _ITERATIONS + 1):  # noqa: B007
        chosen = sum(
            sparse.diags((policy == a).astype(np.float64)) @ matrix
            for a, matrix in enumerate(matrices)
        )
        system = (sparse.eye(len(nodes)) - DISCOUNT * chosen).tocsc()
        values = spsolve(system, rewards[policy, every])
        backed_up = rewards + DISCOUNT * np.stack([matrix @ values for matrix in matrices])
        better = backed_up.argmax(axis=0)
        gain = backed_up.max(axis=0) - backed_up[policy, every]
        policy = np.where(gain > 1e-9, better, policy)
        if gain.max() <= 1e-9:
            break
    ended = time.perf_counter()
    return Policy(outputs, values, steps, (answered - begin, (ended - answered) / steps))


def _nodes() -> Array:
    angles = np.arange(_GRID[0]) * 2 * np.pi / _GRID[0] - np.pi
    speeds = np.linspace(-SPEED, SPEED, _GRID[1])
    return np.stack(np.meshgrid(angles, speeds, indexing="ij"), axis=-1).reshape(-1, 2)


def _answers(outputs: Outputs, states: Array) -> Array:
    """E[Y | state, torque] for each torque, shape (torques, n, 3)."""
    at = features(states)
    inputs = [np.column_stack([at, np.full(len(at), torque)]) for torque in ACTIONS]
    return outputs(np.concatenate(inputs)).reshape(len(ACTIONS), len(at), 3)


def _returns(answers: Array, values: Array) -> Array:
    """Expected return of each torque, shape (torques, n)."""
    return np.stack([reward(y) + DISCOUNT * (_weights(y) @ values) for y in answers])


def _weights(outputs: Array) -> Any:
    """Weights of the nodes in the bilinear interpolation at rows of features, sparse."""
    angle, speed = np.arctan2(outputs[:, 0], outputs[:, 1]), np.clip(outputs[:, 2], -SPEED, SPEED)
    a, b = (angle + np.pi) * _GRID[0] / (2 * np.pi), (speed / SPEED + 1) / 2 * (_GRID[1] - 1)
    i, j = np.floor(a).astype(int), np.minimum(np.floor(b).astype(int), _GRID[1] - 2)
    columns, weights = [], []
    for k, along in ((0, 1 - (a - i)), (1, a - i)):
        for m, up in ((0, 1 - (b - j)), (1, b - j)):
            columns.append((i + k) % _GRID[0] * _GRID[1] + j + m)
            weights.append(along * up)
    rows = np.repeat(np.arange(len(outputs)), 4)
    parts = (np.stack(weights, axis=1).ravel(), (rows, np.stack(columns, axis=1).ravel()))
    return sparse.csr_matrix(parts, shape=(len(outputs), _GRID[0] * _GRID[1]))


# Simulated runs


def simulate(torques: Callable[[Array], Array], starts: int, seed: int = 0) -> Array:
    """States of runs from the hanging position, shape (steps + 1, starts, 2)."""
    rng = np.random.default_rng(seed)
    states = rng.uniform(-_START, _START, (starts, 2))
    states[:, 0] = states[:, 0] % (2 * np.pi) - np.pi
    result = [states]
    for _ in range(round(_SECONDS / STEP)):
        result.append(advance(result[-1], torques(result[-1])))
    return np.stack(result)


def balanced(runs: Array) -> Array:
    """Which runs are a success, shape (starts,)."""
    last = runs[-round(_LAST / STEP) :, :, 0]
    return (np.abs(last) <= _UPRIGHT).all(axis=0)


def returns(runs: Array) -> Array:
    """Sum of the rewards after each step, shape (starts,)."""
    return np.stack([reward(features(states)) for states in runs[1:]]).sum(axis=0)
