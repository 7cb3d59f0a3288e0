"""Copies of models: exact, and sharing nothing with their sources."""

import functools
import types

import keras
import numpy as np
import pytest
from helpers import Subclassed, keras_3_15, stacked
from keras import ops
from layer_harness import difference

import nsl_keras
from nsl_keras import graphs, nesting
from nsl_keras.copying import copied, paired_variables

pytestmark = pytest.mark.usefixtures("eager")
RNG = np.random.default_rng(2)
IMAGES = RNG.normal(size=(3, 8, 8, 2)).astype("float32")


@pytest.mark.jax
def test_unfrozen_restores_each_flag():
    model = stacked(
        *((4,), keras.layers.Dense(3), keras.layers.BatchNormalization()),
        keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)]),
        nsl_keras.layers.NeuralSimilarityDense(2, kernel_trainable=False),
    )
    model.layers[0].trainable = False
    model.layers[-2].layers[1].kernel.trainable = False
    model.layers[-2].layers[1].bias.trainable = False
    vars(model)["cycle"] = cycle = []
    cycle.append(cycle)
    before = [layer.trainable for layer in nesting.sublayers(model)]
    with nesting.unfrozen(model):
        assert len(model.trainable_variables) == 11
        state = [variable.name for variable in model.non_trainable_variables]
        assert state == ["moving_mean", "moving_variance"]
    assert [layer.trainable for layer in nesting.sublayers(model)] == before
    assert len(model.trainable_variables) == 5


class Scaled:
    def predict_step(self, data):
        return self(data / 255)


class ScaledModel(Scaled, keras.Model):
    pass


class ScaledStack(Scaled, keras.Sequential):
    pass


CONVERSIONS = (nsl_keras.convert.add_similarity, nsl_keras.convert.convert_batch_norms)


def assert_predicts_as(converted, model):
    expected, received = (each.predict(IMAGES, verbose=0) for each in (model, converted))
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_the_class_is_kept(convert):
    inputs, layer = keras.Input((8, 8, 2)), keras.layers.Conv2D(2, 3)
    for model in (ScaledModel(inputs, layer(inputs)), ScaledStack([inputs, layer])):
        model.compile("adam", "mse")
        converted = convert(model)
        assert type(converted) is type(model) and not converted.compiled
        assert_predicts_as(converted, model)


def test_copies_of_other_models():
    built_by_a_call = keras.Sequential([keras.layers.Conv2D(3, 3), keras.layers.ReLU()])
    for model in (Subclassed(), built_by_a_call):
        model(IMAGES)
        assert type(copied(model)) is type(model)
        assert_predicts_as(copied(model), model)


def twice(x):
    return 2 * x


def doubled(shape, dtype):
    return 2 * ops.eye(*shape, dtype=dtype)


def test_functions_that_are_not_registered_are_passed_on():
    similarity = nsl_keras.similarities.Diagonal(initializer=doubled)
    layers = [
        nsl_keras.layers.NeuralSimilarityConv2D(2, 3, similarity=similarity),
        keras.layers.Conv2D(2, 3, activation=twice),
        keras.layers.SeparableConv2D(2, 3, activation=twice, bias_initializer=None),
        keras.layers.Dense(2, activation=twice),
    ]
    model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
    converted = nsl_keras.convert.add_similarity(model)
    for each in (converted, nsl_keras.convert.fold(converted)):
        assert_predicts_as(each, model)


@keras_3_15
def test_functions_of_parts_are_passed_on():
    norm = keras.layers.BatchNormalization(beta_regularizer=twice, gamma_constraint=twice)
    backbone = stacked((8, 8, 2), keras.layers.Flatten(), norm)
    parts = [keras.layers.Dense(4, twice), keras.layers.Dense(2, kernel_constraint=twice)]
    head = keras.Sequential(parts)
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, 4)
    model.build((None, 8, 8, 2))
    converted = nsl_keras.convert.convert_batch_norms(model)
    for each in (converted, nsl_keras.convert.fold(converted)):
        assert_predicts_as(each, model)


def test_a_copy_keeps_policies_flags_and_derived_state():
    normalization = keras.layers.Normalization()
    normalization.adapt(IMAGES)
    inputs = keras.Input((8, 8, 2), dtype="float32")
    x = normalization(inputs)
    x = keras.layers.Conv2D(3, 3, dtype="mixed_bfloat16", name="half")(x)
    x = keras.layers.Dense(2, trainable=False, name="frozen")(x)
    scale = 3.0
    x = keras.layers.Lambda(lambda t: scale * t)(x)
    model = keras.Model(inputs, x)
    copy = copied(model)
    assert difference(model, copy, IMAGES) == 0
    assert copy.get_layer("half").dtype_policy.name == "mixed_bfloat16"
    assert not copy.get_layer("frozen").trainable
    assert copy.trainable and len(copy.trainable_variables) == 2


def test_a_copy_keeps_the_flags_of_what_layers_hold():
    inputs = keras.Input((6, 4))
    attention = keras.layers.MultiHeadAttention(2, 2)
    model = keras.Model(inputs, keras.layers.Dense(2)(attention(inputs, inputs)))
    parts = attention.query_dense, attention, attention.output_dense.bias
    for part, count in zip(parts, (8, 2, 9), strict=True):
        attention.trainable = True
        part.trainable = False
        copy = copied(model)
        assert len(copy.trainable_variables) == len(model.trainable_variables) == count
        flags = [variable.trainable for variable in model.variables]
        assert [variable.trainable for variable in copy.variables] == flags


@pytest.mark.jax  # Setting a flag to its present value reaches layers on JAX alone.
@pytest.mark.parametrize("wrap", [None, keras.layers.TimeDistributed])
def test_a_frozen_part_of_a_copy_can_be_unfrozen(wrap):
    base = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Conv2D(3, 3)])
    part = wrap(base, name="part") if wrap else base
    inputs = keras.Input((2, 8, 8, 2) if wrap else (8, 8, 2))
    model = keras.Model(inputs, keras.layers.Dense(2)(part(inputs)))
    part.trainable = False
    copy = copied(model)
    assert len(copy.trainable_variables) == 2
    copy.get_layer(part.name).trainable = True
    assert len(copy.trainable_variables) == 4
    # A new layer in a frozen model is trained, also after the model was saved.
    similar = nsl_keras.convert.add_similarity(model, freeze_backbone=False)
    again = keras.Model.from_config(similar.get_config())
    assert len(similar.trainable_variables) == len(again.trainable_variables) == 3


@pytest.mark.parametrize("change", ["LoRA", "int8"])
def test_copies_of_changed_layers(change):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="dense")])
    (layer,) = model.layers
    if change == "LoRA":
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(np.ones((2, 4)))
    else:
        layer.quantize(change)
    layer.bias.assign(np.arange(4))
    inputs = RNG.normal(size=(3, 6)).astype("float32")
    copy = copied(model)
    assert difference(model, copy, inputs) < 1e-6
    pairs = paired_variables(model, copy)
    assert [one.name for one, _ in pairs] == [each.name for each in layer.variables]
    for one, other in pairs:
        assert (one.path, one.trainable) == (other.path, other.trainable)


def test_what_cannot_be_copied_is_named():
    class Unknown(keras.layers.Layer):
        def __init__(self, function, **kwargs):
            super().__init__(**kwargs)
            self.function = function

        def call(self, inputs):
            return inputs

    parts = [keras.Input((3,)), keras.layers.Dense(2), Unknown(abs, name="unknown")]
    with pytest.raises(ValueError, match="Keras can save and load") as found:
        copied(keras.Sequential(parts))
    assert "Unknown" in str(found.value.__cause__)


def test_names_of_functions_stay():
    model = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.Dense(2, twice)])
    copy = copied(model)
    assert twice.__name__ == "twice" and copy.layers[0].activation is twice
    named_as_a_function_of_keras = types.FunctionType(
        twice.__code__, globals(), "relu", None, None
    )
    model.layers[0].activation = named_as_a_function_of_keras
    assert copied(model).layers[0].activation is named_as_a_function_of_keras


@keras.saving.register_keras_serializable("test_copying")
class Tied(keras.layers.Layer):
    """Holds another layer, and computes with its kernel."""

    def __init__(self, source, is_saved=True, **kwargs):
        super().__init__(**kwargs)
        self.source, self.is_saved = source, is_saved

    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(self.source.kernel))

    def get_config(self):
        source = keras.saving.serialize_keras_object(self.source) if self.is_saved else None
        return super().get_config() | {"source": source}

    @classmethod
    def from_config(cls, config):
        source = keras.saving.deserialize_keras_object(config["source"])
        if source is None:
            source = keras.layers.Dense(5)
            source.build((None, 144))
        return cls(**config | {"source": source})


def tied(**options):
    inputs, dense = keras.Input((8, 8, 2)), keras.layers.Dense(5)
    hidden = dense(keras.layers.Flatten()(keras.layers.Conv2D(4, 3)(inputs)))
    return keras.Model(inputs, Tied(dense, name="tied", **options)(hidden))


def test_tied_weights_stay_tied():
    model = tied()
    for convert in CONVERSIONS:
        converted = convert(model)
        assert converted.layers[-1].source is converted.layers[-2]
        assert_predicts_as(converted, model)
    # A file would untie them.
    with pytest.raises(ValueError, match="Keras can save and load"):
        copied(tied(is_saved=False))


def test_a_predictor_shared_across_a_nested_model_stays_shared():
    shared = nsl_keras.predictors.SharedSimilarityPredictor(adapted_filters=2)
    convolution = functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D, 2, 3, padding="same", predictor=shared
    )
    inner = stacked((8, 8, 2), convolution(), keras.layers.BatchNormalization())
    end = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8, 8, 2)), inner, convolution(), *end])
    for convert in (
        copied,
        nsl_keras.convert.convert_batch_norms,
        nsl_keras.convert.add_film,
        lambda model: nsl_keras.MetaNeighborhoodModel.from_classifier(model, 4).backbone,
    ):
        layers = graphs.layers(convert(model))
        one, two = (each for each in layers if hasattr(each, "bilinear_form"))
        assert one.predictor is two.predictor and one.predictor is not shared


def test_ragged_inputs_stay_ragged():
    inputs = keras.Input((None, 3), ragged=True)
    model = keras.Sequential([inputs, keras.layers.BatchNormalization()])
    for convert in (nsl_keras.convert.convert_batch_norms, nsl_keras.convert.add_film):
        assert convert(model).inputs[0].ragged
