"""Similarities by name and by file, and their shortcuts against the general way."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES
from keras import ops

from nsl_keras import similarities
from nsl_keras.similarity import matrices

RNG = np.random.default_rng(8)
KINDS = {
    "diagonal": similarities.Diagonal,
    "unconstrained": similarities.Unconstrained,
}


@keras.saving.register_keras_serializable("tests")
class Shifted(similarities.Unconstrained):
    """A similarity with an argument, to go through a file."""

    def __init__(self, shift):
        self.shift = shift

    def matrix(self, parameters):
        return parameters + self.shift

    def get_config(self):
        return {"shift": self.shift}


@pytest.mark.parametrize("name", KINDS)
def test_get_and_serialize_by_name(name):
    similarity = similarities.get(name)
    assert type(similarity) is KINDS[name]
    assert similarities.serialize(similarity) == name
    assert similarities.get(similarity) is similarity


@pytest.mark.parametrize("name", KINDS)
def test_get_from_the_form_in_which_keras_serializes_objects(name):
    config = keras.saving.serialize_keras_object(KINDS[name]())
    assert config["registered_name"] == f"nsl_keras>{KINDS[name].__name__}"
    assert type(similarities.get(config)) is KINDS[name]


def test_own_similarity_goes_through_its_config():
    serialized = similarities.serialize(Shifted(0.25))
    assert isinstance(serialized, dict)
    again = similarities.get(serialized)
    assert type(again) is Shifted
    assert again.shift == 0.25


def test_subclass_of_a_known_kind_does_not_take_its_name():
    class Own(similarities.Diagonal):
        pass

    assert similarities.serialize(Own()) != "diagonal"


@pytest.mark.parametrize(
    "identifier",
    [
        "diag",
        None,
        3,
        similarities.Diagonal,
        {"class_name": "Unknown"},
        keras.saving.serialize_keras_object(keras.initializers.Zeros()),
    ],
    ids=["name", "none", "number", "class", "broken_config", "config_of_another"],
)
def test_unknown_identifiers_name_the_known_ones(identifier):
    message = r"`similarity` must be one of 'diagonal', 'unconstrained', .*, or .*Received: "
    with pytest.raises(ValueError, match=message):
        similarities.get(identifier)


def test_base_class_cannot_be_instantiated():
    with pytest.raises(TypeError, match="abstract"):
        similarities.Similarity()


@pytest.mark.parametrize("missing", ["parameter_shape", "parameters_from", "matrix"])
def test_subclass_needs_all_three_methods(missing):
    methods = {
        name: getattr(similarities.Diagonal, name)
        for name in ("parameter_shape", "parameters_from", "matrix")
        if name != missing
    }
    with pytest.raises(TypeError, match=missing):
        type("Partial", (similarities.Similarity,), methods)()


@pytest.mark.parametrize(
    ("name", "taps", "shape", "filters", "normalized"),
    [
        ("diagonal", 9, (9,), 64, True),
        ("diagonal", 6, (6,), 64, True),
        ("unconstrained", 9, (9, 9), 128, False),
        ("unconstrained", 1, (1, 1), 128, False),
    ],
)
def test_parameters(name, taps, shape, filters, normalized):
    similarity = similarities.get(name)
    assert similarity.parameter_shape(taps) == shape
    assert similarity.predictor_filters == filters
    assert similarity.predictor_batch_normalization is normalized


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_parameters_from_a_matrix_and_back(name, dtype):
    similarity = similarities.get(name)
    parameters = RNG.normal(size=similarity.parameter_shape(6)).astype(dtype)
    matrix = similarity.matrix(ops.convert_to_tensor(parameters))
    assert tuple(matrix.shape) == (6, 6)
    again = ops.convert_to_numpy(similarity.parameters_from(matrix))
    assert again.dtype == dtype
    np.testing.assert_array_equal(again, parameters)
    expected = np.diag(parameters) if name == "diagonal" else parameters
    np.testing.assert_array_equal(ops.convert_to_numpy(matrix), expected)


def test_diagonal_takes_the_diagonal_of_any_matrix():
    matrix = np.arange(36.0, dtype="float32").reshape(6, 6)
    parameters = similarities.Diagonal().parameters_from(ops.convert_to_tensor(matrix))
    np.testing.assert_array_equal(ops.convert_to_numpy(parameters), np.diag(matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_shortcuts_agree_with_the_general_way(name, dtype):
    """What a kind overrides equals what the base class makes of its matrix."""
    similarity = similarities.get(name)
    tolerance = {"float64": 1e-13, "float32": 1e-5}[dtype]

    def random(*shape):
        return ops.convert_to_tensor(RNG.normal(size=shape).astype(dtype))

    shape = similarity.parameter_shape(6)
    parameters, kernel = random(*shape), random(6, 3, 4)
    per_position, patches = random(2, 5, 4, *shape), random(2, 5, 4, 6, 3)
    for method, arguments in (
        ("equivalent_kernel", (parameters, kernel)),
        ("compare", (per_position, patches)),
    ):
        special = getattr(similarity, method)(*arguments)
        general = getattr(matrices.Similarity, method)(similarity, *arguments)
        assert tuple(special.shape) == tuple(arguments[1].shape)
        np.testing.assert_allclose(
            ops.convert_to_numpy(special), ops.convert_to_numpy(general), atol=tolerance
        )


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_the_matrix_are_the_taps_of_the_kernel(name):
    """`W^T M x` is the same whether `M` goes to the kernel or to the patches."""
    similarity = similarities.get(name)
    parameters = RNG.normal(size=similarity.parameter_shape(6)).astype("float32")
    kernel = RNG.normal(size=(6, 3, 4)).astype("float32")
    patches = RNG.normal(size=(2, 6, 3)).astype("float32")
    matrix = np.diag(parameters) if name == "diagonal" else parameters
    expected = np.einsum("tco,tu,nuc->no", kernel, matrix, patches)
    equivalent = ops.convert_to_numpy(
        similarity.equivalent_kernel(*map(ops.convert_to_tensor, (parameters, kernel)))
    )
    compared = ops.convert_to_numpy(
        similarity.compare(*map(ops.convert_to_tensor, (parameters, patches)))
    )
    np.testing.assert_allclose(
        np.einsum("uco,nuc->no", equivalent, patches), expected, atol=1e-4
    )
    np.testing.assert_allclose(
        np.einsum("tco,ntc->no", kernel, compared), expected, atol=1e-4
    )
