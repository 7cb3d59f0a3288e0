"""Malformed arguments, calls and files: an error or a right answer, whatever is drawn.

No crash of the process, no hang, no silent NaN. NSL_KERAS_FUZZ=5000 draws more.
"""

import contextlib
import functools
import math
import os
import signal
import tempfile
import warnings

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import ops

import nsl_keras
from nsl_keras import few_shot, layers, similarities
from nsl_keras.callbacks import TrainingBackup

EXAMPLES = int(os.environ.get("NSL_KERAS_FUZZ", "300"))
#: Seconds in which anything must be answered.
LIMIT = 60
#: How a bad argument is refused. Any other error is a mistake of ours.
REFUSALS = (ValueError, TypeError)
#: Graphs and loops of the backends refuse a call with these, too.
CALL_REFUSALS = (*REFUSALS, ArithmeticError, RuntimeError)

partial = functools.partial
pytestmark = pytest.mark.long


def fuzzed(share):
    """A share of the examples; the same ones each time, unless NSL_KERAS_FUZZ is set."""
    return settings(
        max_examples=max(1, round(share * EXAMPLES)),
        deadline=None,
        database=None,
        derandomize="NSL_KERAS_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def in_time():
    def stop(number, frame):
        raise AssertionError(f"No answer in {LIMIT} seconds.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_refusal(error, allowed=CALL_REFUSALS):
    """Whether an error is one that a caller can understand."""
    of_backend = type(error).__name__ in ("InvalidArgumentError", "UnimplementedError")
    return isinstance(error, allowed) or of_backend


SIZES = [-(2**63), -1, 0, 1, 2, 3, 5, 2**31, 2**40, 2**63, 10**30, np.int64(3), np.uint8(2)]
NUMBERS = [*SIZES, -0.5, 0.0, 1e-30, 0.5, 1.0, 1e30, math.inf, -math.inf, math.nan]
OTHERS = [
    *(None, True, False, "False", "", "diagonal", "sphere", "cosine", b"x", 1j),
    *([], [1, 2], (0, 3), (2, 2), {}, {"a": 1}, object(), len, np.ones(2), np.ones((2, 2))),
    *([[1.0, math.nan]], np.array(math.nan), keras.layers.Dense(2)),
]
VALUES = [*NUMBERS, *OTHERS]

IMAGES = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype("float32")
VECTORS = np.random.default_rng(1).normal(size=(4, 4)).astype("float32")
SEQUENCES = np.random.default_rng(2).normal(size=(2, 3, 4)).astype("float32")
BOXES = IMAGES.reshape(2, 6, 6, 2, 1)


def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def recurrent(**arguments):
    return keras.layers.RNN(layers.NeuralSimilarityGRUCell(3, **arguments))


def predicted(**arguments):
    predictor = nsl_keras.predictors.SimilarityPredictor(**arguments)
    return layers.NeuralSimilarityConv2D(3, 3, predictor=predictor)


def similar(**arguments):
    similarity = similarities.Unconstrained(**arguments)
    return layers.NeuralSimilarityConv2D(3, 3, similarity=similarity)


def head(**arguments):
    return layers.MetaNeighborhoodHead(layers.CosineDense(3), **arguments)


def neighbors_model(**arguments):
    return nsl_keras.MetaNeighborhoodModel(None, layers.CosineDense(3), **arguments)


def learner(kind, **arguments):
    return kind(network(), **arguments)


SIMILARITY = "similarity predictor"
#: Keras refuses the rest of its own arguments.
GEOMETRY = "kernel_size strides dilation_rate"
CONVOLUTION = f"{SIMILARITY} {GEOMETRY} groups"
ADAPTATION = """dictionary inner_steps inner_learning_rate learning_rate_form chunk_size
    task inner_loop"""
#: Which arguments to fuzz.
FUZZED = {
    "conv1d": CONVOLUTION,
    "conv2d": CONVOLUTION,
    "conv3d": CONVOLUTION,
    "depthwise": f"{SIMILARITY} {GEOMETRY}",
    "transpose": f"{SIMILARITY} {GEOMETRY} output_padding",
    "dense": f"{SIMILARITY} block_size",
    "gru": "similarity recurrent_similarity predictor block_size",
    "sphere_conv2d": f"normalize response {GEOMETRY} groups",
    "sphere_dense": "normalize response",
    "similarity": "initializer regularizer constraint shared_by shape_threshold",
    "global": "similarity hidden_filters data_format",
    "predictor": """kind width output_kernel_size downsampling start
        batch_normalization""",
    "cosine": "units",
    "film": "dictionary_size sharpness learn_sharpness residual axis",
    "normalization": "momentum momentum_warmup epsilon",
    "dictionary": """num_neighbors num_values metric temperature value_scale task
        fixed_values dropout dropout_scope seed""",
    "head": ADAPTATION,
    "model": ADAPTATION,
    "maml": """inner_variables inner_steps inner_learning_rate extra_steps
        learning_rate_form first_order test_inner_steps extra_variables test_extra_steps
        batch_normalization""",
    "finetuner": "ways steps variables rule new_classifier classifier_initializer",
    "proto_net": "ways metric temperature learn_temperature batch_normalization",
    "backup": "folder data callbacks every delete_at_end",
}
#: A function that makes a layer, and the inputs of its call.
LAYERS = {
    "conv1d": (partial(layers.NeuralSimilarityConv1D, 3, kernel_size=2), SEQUENCES),
    "conv2d": (partial(layers.NeuralSimilarityConv2D, 3, kernel_size=3), IMAGES),
    "conv3d": (partial(layers.NeuralSimilarityConv3D, 3, kernel_size=2), BOXES),
    "depthwise": (partial(layers.NeuralSimilarityDepthwiseConv2D, kernel_size=3), IMAGES),
    "transpose": (
        partial(layers.NeuralSimilarityConv2DTranspose, 3, kernel_size=3),
        IMAGES,
    ),
    "dense": (partial(layers.NeuralSimilarityDense, 3), VECTORS),
    "gru": (recurrent, SEQUENCES),
    "sphere_conv2d": (partial(layers.SphereConv2D, 3, kernel_size=3), IMAGES),
    "sphere_dense": (partial(layers.SphereDense, 3), VECTORS),
    "similarity": (similar, IMAGES),
    "global": (layers.GlobalNeuralSimilarity2D, IMAGES),
    "predictor": (predicted, IMAGES),
    "cosine": (partial(layers.CosineDense, units=3), VECTORS),
    "film": (partial(layers.InstanceFiLM, dictionary_size=3), IMAGES),
    "normalization": (layers.BatchNormalization, IMAGES),
    "dictionary": (
        partial(layers.NeighborDictionary, num_neighbors=6, num_values=3),
        VECTORS,
    ),
    "head": (partial(head, dictionary=6), VECTORS),
    "model": (partial(neighbors_model, dictionary=6), VECTORS),
    "maml": (partial(learner, few_shot.MAML), None),
    "finetuner": (partial(learner, few_shot.Finetuner, ways=3), None),
    "proto_net": (partial(learner, few_shot.ProtoNet, ways=3), None),
    "backup": (partial(TrainingBackup, folder="states"), None),
}

ARGUMENTS = st.sampled_from(sorted(LAYERS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.dictionaries(
            st.sampled_from(FUZZED[name].split()),
            st.sampled_from(VALUES),
            min_size=1,
            max_size=2,
        ),
    )
)


@fuzzed(0.5)
@given(drawn=ARGUMENTS)
def test_malformed_arguments(drawn):
    name, arguments = drawn
    make, inputs = LAYERS[name]
    with in_time():
        try:
            made = make(**arguments)
        except REFUSALS:
            return
        if inputs is None:
            return
        try:
            outputs = ops.convert_to_numpy(made(inputs))
        except Exception as error:
            assert is_refusal(error), f"{name}({arguments}): {error!r}"
            return
    assert np.all(np.isfinite(outputs)), f"{name}({arguments}) gives NaN"


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6]), max_size=5)
DTYPES = st.sampled_from(
    ["float32", "float64", "float16", "int32", "bool", "complex64", "U1"]
)
FLAWS = st.sampled_from([None, math.nan, math.inf, 1e30, -1e30, 0.0])


def array(shape, dtype, flaw):
    values = np.random.default_rng(0).normal(size=shape)
    if flaw is not None and values.size:
        values.flat[-1] = flaw
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values.astype(dtype)


@functools.cache
def built():
    """One layer or model of each kind, and further functions of inputs."""
    found = {}
    for name, (make, inputs) in LAYERS.items():
        if inputs is None:
            continue
        found[name] = (layer := make())
        layer(inputs)
    model = found["model"]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    found["neighbors"] = lambda x: model.neighbors(x).weights
    sound = model.get_weights()

    def restoring(function):
        """Whatever a call does to the model, the next one meets sound weights."""

        def call(x):
            try:
                return function(x, np.arange(len(x)) % 3)
            finally:
                model.set_weights(sound)

        return call

    found["initialize_from"] = restoring(model.initialize_from)
    found["fit"] = restoring(lambda x, y: model.fit(x, y, verbose=0).history.get("loss"))
    return found


NAMES = sorted({*(n for n in LAYERS if LAYERS[n][1] is not None), "neighbors", "fit"})


@fuzzed(0.3)
@given(
    name=st.sampled_from([*NAMES, "initialize_from"]),
    shape=SHAPES,
    dtype=DTYPES,
    flaw=FLAWS,
    near=st.booleans(),
)
def test_malformed_calls(name, shape, dtype, flaw, near):
    expected = LAYERS[name][1] if name in LAYERS else VECTORS
    if near:  # The right shape, or one that differs in one axis.
        axis, size = (shape[:2] + [0, 0])[:2]
        wanted = list(expected.shape)
        wanted[axis % len(wanted)] = size or wanted[axis % len(wanted)]
        shape = wanted
    inputs = array(shape, dtype, flaw)
    with in_time():
        try:
            outputs = built()[name](inputs)
        except Exception as error:
            # Keras's RNN looks at the second axis before it counts them.
            of_keras = name == "gru" and len(shape) < 2 and isinstance(error, IndexError)
            assert of_keras or is_refusal(error), (
                f"{name} of {inputs.dtype}{shape}: {error!r}"
            )
            return
    if outputs is None or inputs.dtype.kind not in "fiub":
        return
    finite = np.all(np.isfinite(ops.convert_to_numpy(outputs)))
    if np.all(np.abs(inputs) < 100):
        assert finite, f"{name} of {shape} gives NaN"
    assert not (finite and np.any(np.isnan(inputs))), f"{name} of {shape} swallows NaN"


@functools.cache
def whole_files():
    """The content of a model's file and of a state of training."""
    with tempfile.TemporaryDirectory() as folder:
        keras.utils.set_random_seed(0)
        model = neighbors_model(dictionary=6)
        model(VECTORS)
        model.save(f"{folder}/model.keras")
        model = network()
        model.compile("adam", "mse", run_eagerly=True)
        backup = TrainingBackup(folder, delete_at_end=False)
        model.fit(VECTORS, VECTORS[:, :3], callbacks=[backup], verbose=0)
        contents = {}
        for name in ("model.keras", "epoch_1.state"):
            with open(f"{folder}/{name}", "rb") as file:
                contents[name] = file.read()
        return contents


@fuzzed(0.2)
@given(
    name=st.sampled_from(["model.keras", "epoch_1.state"]),
    where=st.floats(0, 1),
    change=st.sampled_from(["cut", "flip", "zeros", "insert", "double", "nothing"]),
    length=st.integers(1, 300),
)
def test_malformed_files(name, where, change, length):
    content = whole_files()[name]
    at = round(where * (len(content) - 1))
    changed = {
        "cut": content[:at],
        "flip": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        "zeros": content[:at] + bytes(length) + content[at + length :],
        "insert": content[:at] + bytes(length) + content[at:],
        "double": content + content,
        "nothing": content,
    }[change]
    with tempfile.TemporaryDirectory() as folder, in_time():
        path = f"{folder}/{name}"
        with open(path, "wb") as file:
            file.write(changed)
        if name == "epoch_1.state":
            assert TrainingBackup(folder).epoch == int(changed == content)
            return
        try:
            model = keras.saving.load_model(path)
        except Exception:
            assert changed != content
            return
        assert np.all(np.isfinite(ops.convert_to_numpy(model(VECTORS))))
