"""What every layer with an `M` has: its arguments, and a mark in files of weights."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import keras
import numpy as np

from nsl_keras import nesting, similarities, validation
from nsl_keras.similarity import predictors
from nsl_keras.similarity.dynamic import DynamicForm
from nsl_keras.similarity.form import BilinearForm
from nsl_keras.similarity.static import StaticForm
from nsl_keras.turning import Foldable

#: An entry in the file of a layer with a similarity.
_MARK = "has_similarity"


class WithSimilarity(nesting.KeepsFrozen, Foldable):
    """Private mixin, in front of a Keras layer: a layer with a static or dynamic `M`.

    A mark in the file makes the plain layer refuse the weights of this layer: it would
    ignore those of `M` and load the rest. `bilinear_form` is the `M`; the subclass's
    `set_similarity` makes it for a plain layer, and `build_similarity` builds it.
    """

    #: The form of a predicted `M(x)`; `None` if the layer is always static.
    dynamic_form: Any = DynamicForm
    # Read-only: the form holds them.
    similarity = property(attrgetter("bilinear_form.similarity"))
    predictor = property(attrgetter("bilinear_form.predictor"))
    block_size = property(attrgetter("bilinear_form.block_size"))

    def __init__(
        self,
        *args: Any,
        similarity: Any = "diagonal",
        predictor: Any = None,
        block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        similarity, predictor = similarities.get(similarity), predictors.get(predictor)
        self.set_similarity(similarity, predictor, block_size)

    def make_form(self, similarity: Any, predictor: Any, block_size: Any, name: str) -> Any:
        """Returns an `M` for a kernel: a static one, or with a predictor a dynamic one."""
        options = {"block_size": block_size, "dtype": self.dtype_policy, "name": name}
        if predictor is None:
            return StaticForm(similarity, **options)
        fits = self.dynamic_form is not None and getattr(self, "groups", 1) == 1
        demand = "None in EinsumDense and transposed layers, and with `groups` above 1"
        validation.require(fits, "predictor", demand, predictor)
        return self.dynamic_form(similarity, predictor, **options)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.build_similarity(input_shape)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        store[_MARK] = np.ones(1)  # A plain layer refuses one entry too many.

    def load_own_variables(self, store: Any) -> None:
        own = set(store.keys()) - {_MARK}
        super().load_own_variables({key: store[key] for key in own})

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        predictor: Any = serialize(self.predictor)
        if isinstance(self.predictor, keras.layers.Layer):
            # Keras's own key for objects that several configs share. For an object inside a
            # layer, Keras sets it only from the second config on (3.15), so a loaded model
            # would contain two copies.
            live = predictor["shared_object_id"] = predictors.LiveId(id(self.predictor))
            forms = predictors.forms_of[self.predictor]
            own = [each for each in forms_in(self) if each in forms]
            live.layers = len(forms) // len(own)  # A recurrent cell has two.
        return {
            **super().get_config(),
            "similarity": serialize(self.similarity),
            "predictor": predictor,
            "block_size": self.block_size,
        }


def forms_in(layer: keras.layers.Layer) -> list[BilinearForm]:
    """Returns the `M` of each kernel in a layer, including its cells."""
    return [each for each in nesting.sublayers(layer) if isinstance(each, BilinearForm)]
