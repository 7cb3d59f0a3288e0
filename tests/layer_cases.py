"""Every public layer, in the configurations that go through `check_layer`."""

import functools

import keras
from layer_harness import LayerCase

from nsl_keras import layers, predictors, similarities
from nsl_keras.key_metrics import Euclidean

IMAGE, SEQUENCE, BOX = (9, 8, 4), (9, 4), (5, 4, 3, 2)
partial = functools.partial


def convolution(**arguments):
    return partial(
        layers.NeuralSimilarityConv2D, **{"filters": 6, "kernel_size": 3, **arguments}
    )


def with_predictor(make_predictor, layer, **arguments):
    """A layer and its predictor, both made anew."""

    def make(**options):
        return layer(predictor=make_predictor(), **arguments, **options)

    return make


def shared(**arguments):
    return partial(
        predictors.SharedSimilarityPredictor,
        predictors.SimilarityPredictor(width=8, **arguments),
        adapted_filters=5,
    )


def head(inner_loop, dictionary=None, **arguments):
    """A head that is made anew with each layer; gradients need no dropout here."""

    def make(**options):
        neighbors = layers.NeighborDictionary(
            12, seed=1, **(dictionary or {}), dtype=options.get("dtype")
        )
        inner = layers.CosineDense(3)
        # Half precision on the tape is refused, so the head states its own dtype.
        if inner_loop == "tape":
            hidden = keras.layers.Dense(5, "tanh", dtype="float32")
            inner = keras.Sequential([hidden, keras.layers.Dense(3, dtype="float32")])
        return layers.MetaNeighborhoodHead(
            inner, neighbors, inner_loop=inner_loop, **arguments, **options
        )

    return make


def film(**options):
    if options.pop("data_format", None) == "channels_first":
        options["axis"] = 1
    return layers.InstanceFiLM(5, **options)


def recurrent(cell, **arguments):
    """Keras's recurrent layer around a cell that is made anew with it."""

    def make(**options):
        return keras.layers.RNN(cell(5, **arguments), return_sequences=True, **options)

    return make


def spatial(name, make, trainable, non_trainable=0, shape=IMAGE, unknown_sizes=True):
    """A layer on images, of either data format."""
    first = {"data_format": "channels_first"}
    return LayerCase(name, make, shape, trainable, non_trainable, first, unknown_sizes)


SAME, UNCONSTRAINED = {"padding": "same"}, {"similarity": "unconstrained"}
IN_BLOCKS = partial(predictors.SimilarityPredictor, downsampling=3)
TRANSPOSED = layers.NeuralSimilarityConv2DTranspose
DEPTHWISE = partial(layers.NeuralSimilarityDepthwiseConv2D, depth_multiplier=2)
CONV1D, CONV3D = layers.NeuralSimilarityConv1D, layers.NeuralSimilarityConv3D
CONVOLUTIONS = [
    spatial("conv2d_static_diagonal", convolution(**SAME, activation="relu"), 3),
    spatial(
        "conv2d_static_groups", convolution(**UNCONSTRAINED, groups=2, strides=2, **SAME), 3
    ),
    spatial(
        "conv2d_static_sparse_learned_shape",
        convolution(similarity=similarities.Sparse(5), learn_shape=True),
        4,
    ),
    spatial(
        "conv2d_static_for_each_filter",
        convolution(similarity="symmetric", shared_by="filter", **SAME),
        3,
    ),
    spatial(
        "conv2d_transpose_static",
        partial(TRANSPOSED, 6, 4, 2, **SAME, output_padding=1, **UNCONSTRAINED),
        3,
    ),
    spatial(
        "conv2d_transpose_sphere",
        partial(TRANSPOSED, 6, (2, 3), 2, predictor="sphere"),
        8,
        6,
    ),
    spatial(
        "conv2d_static_full",
        convolution(similarity="full", groups=2, **SAME),
        3,
        unknown_sizes=False,
    ),
    spatial(
        "conv2d_static_product", convolution(similarity=similarities.Product(3), **SAME), 3
    ),
    spatial(
        "conv2d_sphere_diagonal", convolution(predictor="sphere", strides=2, **SAME), 8, 6
    ),
    spatial(
        "conv2d_sphere_unconstrained",
        convolution(**UNCONSTRAINED, predictor="sphere", dilation_rate=2),
        4,
    ),
    spatial(
        "conv2d_full_sphere",
        convolution(predictor="full_sphere", kernel_size=(2, 3), **SAME),
        *(8, 6),
    ),
    spatial(
        "conv2d_without_identity",
        convolution(
            **UNCONSTRAINED, predictor=predictors.SimilarityPredictor(residual=False)
        ),
        5,
    ),
    spatial(
        "conv2d_in_blocks",
        with_predictor(IN_BLOCKS, convolution(**UNCONSTRAINED, kernel_size=(2, 3))),
        4,
    ),
    spatial(
        "conv2d_cnn",
        convolution(**UNCONSTRAINED, predictor="cnn"),
        *(6, 3),
        unknown_sizes=False,
    ),
    spatial(
        "conv2d_shared",
        with_predictor(shared(), convolution(strides=2, learn_shape=True)),
        6,
    ),
    spatial(
        "conv1d_static_causal",
        partial(
            CONV1D, 6, 3, 1, "causal", dilation_rate=2, similarity="positive_semidefinite"
        ),
        3,
        shape=SEQUENCE,
    ),
    spatial(
        "conv1d_shared_pooled",
        with_predictor(shared(pooled=True), partial(CONV1D, 6, 3, **SAME)),
        5,
        shape=SEQUENCE,
    ),
    spatial(
        "conv3d_static", partial(CONV3D, 6, 2, **SAME, similarity="symmetric"), 3, shape=BOX
    ),
    spatial(
        "conv3d_sphere",
        partial(CONV3D, 6, (2, 3, 1), strides=2, predictor="sphere"),
        *(8, 6),
        shape=BOX,
    ),
    spatial(
        "depthwise_static", partial(DEPTHWISE, 3, strides=2, **SAME, **UNCONSTRAINED), 3
    ),
    spatial(
        "depthwise_sphere",
        partial(DEPTHWISE, (2, 3), similarity="symmetric", predictor="sphere"),
        4,
    ),
]

OTHER_IMAGES = [
    spatial(
        "sphere_conv2d",
        partial(layers.SphereConv2D, 6, 3, padding="same", use_bias=True),
        2,
    ),
    spatial(
        "sphere_conv2d_groups",
        partial(layers.SphereConv2D, 6, (3, 2), strides=2, groups=2),
        1,
        unknown_sizes=False,
    ),
    spatial(
        "sphere_conv2d_learnable_sigmoid",
        partial(layers.SphereConv2D, 6, 3, groups=2, response="learnable_sigmoid"),
        2,
    ),
    spatial("instance_film", film, 4),
    LayerCase(
        "batch_normalization", layers.BatchNormalization, IMAGE, 2, 3, unknown_sizes=True
    ),
    *(
        spatial(
            f"global_{similarity}",
            partial(layers.GlobalNeuralSimilarity2D, similarity=similarity),
            trainable,
            unknown_sizes=similarity not in ("diagonal", "unconstrained"),
        )
        for similarity, trainable in (
            ("diagonal", 1),
            ("unconstrained", 1),
            ("predicted_mask", 2),
            ("attention", 2),
            ("softmax_attention", 4),
        )
    ),
]

VECTORS_AND_SEQUENCES = [
    LayerCase(
        "sphere_dense",
        partial(layers.SphereDense, 5, "tanh", use_bias=True, response="learnable_sigmoid"),
        (4, 7),
        3,
    ),
    LayerCase(
        "dense_static_blocks",
        partial(layers.NeuralSimilarityDense, 5, similarity="unconstrained", block_size=3),
        (2, 12),
        3,
    ),
    LayerCase(
        "dense_dynamic_sphere",
        partial(layers.NeuralSimilarityDense, 5, "tanh", predictor="sphere"),
        (12,),
        *(8, 6),
    ),
    LayerCase(
        "dense_dynamic_cnn_blocks",
        partial(
            layers.NeuralSimilarityDense,
            *(5, None, False),
            similarity="symmetric",
            block_size=4,
            predictor="cnn",
            learn_shape=True,
        ),
        (2, 12),
        *(6, 3),
    ),
    LayerCase(
        "simple_rnn_static",
        recurrent(layers.NeuralSimilaritySimpleRNNCell, similarity="symmetric"),
        (4, 6),
        5,
    ),
    LayerCase(
        "gru_static_blocks",
        recurrent(
            layers.NeuralSimilarityGRUCell,
            similarity="positive_semidefinite",
            block_size=2,
            recurrent_block_size=None,
            reset_after=False,
        ),
        (4, 6),
        5,
    ),
    LayerCase(
        "gru_dynamic_sphere",
        recurrent(layers.NeuralSimilarityGRUCell, predictor="sphere"),
        (4, 6),
        7,
    ),
    LayerCase(
        "lstm_dynamic_cnn_dropout",
        recurrent(
            layers.NeuralSimilarityLSTMCell,
            similarity="unconstrained",
            predictor="cnn",
            recurrent_similarity=None,
            dropout=0.2,
            recurrent_dropout=0.2,
            seed=1,
        ),
        (4, 6),
        5,
    ),
    LayerCase(
        "gru_layer_static",
        partial(layers.NeuralSimilarityGRU, 5, similarity="unconstrained", use_bias=False),
        (4, 6),
        4,
    ),
    LayerCase(
        "lstm_layer_dynamic_sphere",
        partial(layers.NeuralSimilarityLSTM, 5, predictor="sphere", return_sequences=True),
        (4, 6),
        7,
    ),
]

EUCLIDEAN = {"metric": "euclidean", "temperature": 5.0}
NEIGHBORHOODS = [
    LayerCase("cosine_dense", partial(layers.CosineDense, 5), (7,), 2),
    LayerCase(
        # The values take no part in attention.
        "neighbor_dictionary",
        partial(layers.NeighborDictionary, 12, 3, fixed_values=True, seed=1, dropout=0.25),
        (7,),
        1,
    ),
    LayerCase(
        "neighbor_dictionary_given_values",
        partial(
            layers.NeighborDictionary,
            *(4, 1),
            fixed_values=[[0.5], [-1.0], [2.0], [0.0]],
            task="regression",
            seed=1,
            dropout=0.25,
        ),
        (7,),
        1,
    ),
    LayerCase(
        "neighbor_dictionary_distance",
        partial(
            layers.NeighborDictionary,
            *(12, 3),
            metric=Euclidean(squared=False),
            learn_temperature=True,
            fixed_values=True,
        ),
        (7,),
        2,
    ),
    LayerCase(
        "meta_neighborhood_head_dual",
        head("dual", inner_steps=2, learning_rate_form="diagonal", chunk_size=5),
        (7,),
        5,
        full_precision=True,
    ),
    LayerCase(
        "meta_neighborhood_head_tape",
        head("tape", {**EUCLIDEAN, "dropout_scope": "batch"}),
        (7,),
        7,
        full_precision=True,
    ),
    LayerCase(
        "meta_neighborhood_head_regression",
        head("dual", EUCLIDEAN, task="regression"),
        (7,),
        5,
        full_precision=True,
    ),
]

CASES = [*CONVOLUTIONS, *OTHER_IMAGES, *VECTORS_AND_SEQUENCES, *NEIGHBORHOODS]
