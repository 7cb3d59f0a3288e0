"""Compares regression with learned neighbors to the same network without neighbors.

The data are scikit-learn's: ten measurements of 442 diabetes patients, and the progression
of the disease a year later. Both models are trained by one recipe on the same folds. Errors
are mean squared errors of normalized targets; predicting the mean target has an error of 1.

    python examples/regression.py          # 30 seconds on one core
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import StandardScaler

import nsl_keras


def features():
    return keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, activation="relu")])


def plain_model():
    return keras.Sequential([features(), keras.layers.Dense(1)])


def neighbor_model():
    return nsl_keras.MetaNeighborhoodModel(
        features(),
        keras.layers.Dense(1),
        nsl_keras.layers.NeighborDictionary(
            100, metric="euclidean", temperature=1.0, seed=0
        ),
        task="regression",
    )


def squared_error(predicted, targets):
    predicted = keras.ops.convert_to_numpy(predicted)
    return float(np.mean((predicted - targets) ** 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--folds", type=int, default=3)
    args = parser.parse_args()

    x, y = load_diabetes(return_X_y=True)
    y = y[:, None]
    errors = {"plain": [], "neighbors": [], "before adaptation": [], "kNN": []}
    folds = KFold(args.folds, shuffle=True, random_state=0)
    for number, (train, test) in enumerate(folds.split(x)):
        # Free values of the dictionary start near zero, so scale the targets too.
        scale_x, scale_y = StandardScaler().fit(x[train]), StandardScaler().fit(y[train])
        train_x, test_x = (scale_x.transform(x[part]) for part in (train, test))
        train_y, test_y = (scale_y.transform(y[part]) for part in (train, test))
        for name, make in {"plain": plain_model, "neighbors": neighbor_model}.items():
            keras.utils.set_random_seed(number)
            model = make()
            model.compile(keras.optimizers.Adam(1e-3), loss="mean_squared_error")
            model.fit(train_x, train_y, batch_size=32, epochs=args.epochs, verbose=0)
            errors[name].append(squared_error(model(test_x), test_y))
        before = squared_error(model(test_x, adapt=False), test_y)
        errors["before adaptation"].append(before)
        nearest = KNeighborsRegressor(15).fit(train_x, train_y)
        errors["kNN"].append(squared_error(nearest.predict(test_x), test_y))

    for name, of_folds in errors.items():
        each = ", ".join(f"{error:.3f}" for error in of_folds)
        print(f"{name:18} mean {np.mean(of_folds):.3f}   folds {each}")
    differences = np.subtract(errors["neighbors"], errors["plain"])
    print("neighbors - plain, by fold:", ", ".join(f"{each:+.3f}" for each in differences))
    found = model.neighbors(test_x[:1], k=3, effects=True)
    values = scale_y.inverse_transform(found.values[0])[:, 0]
    changes = found.output_changes[0, :, 0] * scale_y.scale_[0]  # In the target's unit.
    print("one patient, the three entries that moved the prediction most:")
    rows = zip(found.indices[0], found.weights[0], values, changes, strict=True)
    for entry, weight, value, change in rows:
        print(
            f"  entry {entry}, attention {weight:.2f}, target {value:.0f}, "
            f"moved it by {change:+.1f}"
        )
    print("Look at the differences: below zero the neighbors help. If the folds differ")
    print("far more than that, these patients show neither gain nor loss.")


if __name__ == "__main__":
    main()
