"""What inference computes once: all that depends on weights, but on no query.

The gradients of the inner loss at the dictionary's entries do not depend on the query, and
cost far more than the rest of a prediction. `predict`, `evaluate`, `neighbors` and exports
compute them once, and keep them in `Constants`, variables that no file of weights contains.

They are never out of date, because only three places use them:

* the functions that Keras runs on the batches of `predict` and `evaluate`. Each call of
  these methods computes the constants anew, just before its first batch: callbacks that
  change weights at the beginning, as `keras.callbacks.SwapEMAWeights` does, have run;
* `neighbors` and an export, right after they have computed them.

Everywhere else, for instance in `model(x)` or in a training loop of your own, each call
computes everything, and so is differentiable. So does a `test_step` or `predict_step` of
your own, which may change weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops, tree

from nsl_keras.backend import updated


class Constants:
    """Variables for the structure of tensors that a function computes.

    Keras does not track them itself.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute
        self.variables: list[keras.Variable] = []
        self.in_use = False

    def build(self) -> None:
        """Creates a variable for each tensor."""
        tensors = self.compute()
        self._structure = tree.map_structure(lambda _: 0, tensors)
        options = {"trainable": False, "name": "constant"}
        self.variables = [
            keras.Variable("zeros", each.shape, each.dtype, **options)
            for each in tree.flatten(tensors)
        ]

    def update(self) -> None:
        """Computes the tensors and assigns them to the variables."""
        tensors = tree.flatten(self.compute())
        for variable, tensor in zip(self.variables, tensors, strict=True):
            variable.assign(tensor)

    def read(self) -> Any:
        values = [ops.convert_to_tensor(variable) for variable in self.variables]
        return tree.pack_sequence_as(self._structure, values)

    def computed(self) -> contextlib.AbstractContextManager[None]:
        """Computes the tensors, which the head then reads in the context."""
        self.update()
        return self.used()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Lets the head read the constants instead of computing them."""
        self.in_use = bool(self.variables)
        try:
            yield
        finally:
            self.in_use = False


@dataclasses.dataclass
class Once:
    """A model's function of batches; computes the constants before the first batch."""

    model: Any
    function: Callable[..., Any]
    is_due: bool = True

    def __call__(self, *arguments: Any) -> Any:
        head = self.model.neighborhood
        if not head.built:  # The function is about to build the model.
            return self.function(*arguments)
        if self.is_due:
            arguments = updated(self.model, head.constants.update, arguments)
            self.is_due = False
        with head.constants.used():
            return self.function(*arguments)
