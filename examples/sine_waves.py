"""Few-shot regression: learns a new sine wave from ten points with MAML.

MAML trains a network so that a gradient step fits it to a wave. For comparison, another
network is trained on the points of all waves. Finn et al. (2017) take 70,000 iterations.

    python examples/sine_waves.py          # 40 seconds on one core
"""

import argparse

import keras
import numpy as np

import nsl_keras


def waves(rng, count, queries):
    """Points of random waves: ten to adapt to, and queries with their targets."""
    amplitude = rng.uniform(0.1, 5.0, (count, 1, 1))
    phase = rng.uniform(0.0, np.pi, (count, 1, 1))
    x = rng.uniform(-5.0, 5.0, (count, 10 + queries, 1))
    y = amplitude * np.sin(x - phase)
    return (x[:, :10], y[:, :10], x[:, 10:]), y[:, 10:]


def network():
    hidden = [keras.layers.Dense(40, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((1,)), *hidden, keras.layers.Dense(1)])


def learner(model, steps):
    options = {"inner_steps": steps, "inner_learning_rate": 0.01}
    return nsl_keras.few_shot.MAML(model, inner_loss="mean_squared_error", **options)


def errors(iterations, seed):
    """Mean squared errors on new waves after 0, 1 and 10 steps on ten points."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    inputs, targets = waves(rng, 25 * iterations, queries=10)
    adaptable, pretrained = network(), network()
    points = inputs[2].reshape(-1, 1), targets.reshape(-1, 1)
    trained = (learner(adaptable, 1), (inputs, targets), 25), (pretrained, points, 250)
    for model, (x, y), size in trained:
        model.compile(keras.optimizers.Adam(1e-3), "mean_squared_error")
        model.fit(x, y, batch_size=size, verbose=0)

    inputs, targets = waves(rng, 600, queries=100)
    measured = {}
    for name, model in {"MAML": adaptable, "pretrained": pretrained}.items():
        found = [model.predict(inputs[2].reshape(-1, 1), 1000, 0).reshape(targets.shape)]
        found += [learner(model, steps).predict(inputs, verbose=0) for steps in (1, 10)]
        measured[name] = [float(np.mean((each - targets) ** 2)) for each in found]
    return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=5000)
    print("mean squared error on new waves after 0, 1 and 10 steps on ten points")
    for name, found in errors(parser.parse_args().iterations, seed=0).items():
        print(f"{name:10}", *(f"{error:.2f}" for error in found))


if __name__ == "__main__":
    main()
