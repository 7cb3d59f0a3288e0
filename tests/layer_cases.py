"""Every public layer, in the configurations that go through `check_layer`."""

import functools

import keras
from layer_harness import LayerCase

from nsl_keras import layers, predictors, similarities

FIRST = {"data_format": "channels_first"}
IMAGE = (9, 8, 4)


def convolution(**arguments):
    return functools.partial(
        layers.NeuralSimilarityConv2D, **{"filters": 6, "kernel_size": 3, **arguments}
    )


def with_predictor(make_predictor, layer, **arguments):
    """A layer and its predictor, both made anew."""

    def make(**options):
        return layer(predictor=make_predictor(), **arguments, **options)

    return make


def shared(**arguments):
    return functools.partial(
        predictors.SharedSimilarityPredictor,
        predictors.SimilarityPredictor(width=8, **arguments),
        adapted_filters=5,
    )


def head(inner_loop, dictionary=None, **arguments):
    """A head that is made anew with each layer; gradients need no dropout here."""

    def make(**options):
        own = layers.NeighborDictionary(
            12, seed=1, **(dictionary or {}), dtype=options.get("dtype")
        )
        # Half precision on the tape is refused, so the head states its own dtype.
        if inner_loop == "tape":
            inner = keras.Sequential(
                [
                    keras.layers.Dense(5, "tanh", dtype="float32"),
                    keras.layers.Dense(3, dtype="float32"),
                ]
            )
        else:
            inner = layers.CosineDense(3)
        return layers.MetaNeighborhoodHead(
            inner,
            own,
            inner_loop=inner_loop,
            **arguments,
            **options,
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


CASES = [
    LayerCase(
        "conv2d_static_diagonal",
        convolution(padding="same", activation="relu"),
        IMAGE,
        trainable=3,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_static_unconstrained_groups",
        convolution(similarity="unconstrained", groups=2, strides=2, padding="same"),
        IMAGE,
        trainable=3,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_dynamic_sphere_diagonal",
        convolution(predictor="sphere", strides=2, padding="same"),
        IMAGE,
        trainable=8,
        non_trainable=6,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_dynamic_sphere_unconstrained",
        convolution(similarity="unconstrained", predictor="sphere", dilation_rate=2),
        IMAGE,
        trainable=4,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_dynamic_full_sphere",
        convolution(predictor="full_sphere", kernel_size=(2, 3), padding="same"),
        IMAGE,
        trainable=8,
        non_trainable=6,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_dynamic_in_blocks",
        with_predictor(
            functools.partial(predictors.SimilarityPredictor, downsampling=3),
            convolution(similarity="unconstrained", kernel_size=(2, 3)),
        ),
        IMAGE,
        trainable=4,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_dynamic_cnn_unconstrained",
        convolution(similarity="unconstrained", predictor="cnn"),
        IMAGE,
        trainable=6,
        non_trainable=3,
        data_formats=FIRST,
    ),
    LayerCase(
        "sphere_conv2d",
        functools.partial(layers.SphereConv2D, 6, 3, padding="same", use_bias=True),
        IMAGE,
        trainable=2,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "sphere_conv2d_groups",
        functools.partial(layers.SphereConv2D, 6, (3, 2), strides=2, groups=2),
        IMAGE,
        trainable=1,
        data_formats=FIRST,
    ),
    LayerCase(
        "batch_normalization",
        layers.BatchNormalization,
        IMAGE,
        trainable=2,
        non_trainable=3,
        unknown_sizes=True,
    ),
    LayerCase("cosine_dense", functools.partial(layers.CosineDense, 5), (7,), trainable=2),
    LayerCase(
        "instance_film",
        film,
        IMAGE,
        trainable=4,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        # The values take no part in attention.
        "neighbor_dictionary",
        functools.partial(
            layers.NeighborDictionary, 12, 3, fixed_values=True, seed=1, dropout=0.25
        ),
        (7,),
        trainable=1,
        non_trainable=0,
    ),
    LayerCase(
        "meta_neighborhood_head_dual",
        head("dual", inner_steps=2, learning_rate_form="diagonal", chunk_size=5),
        (7,),
        trainable=5,
        full_precision=True,
    ),
    LayerCase(
        "meta_neighborhood_head_tape",
        head(
            "tape",
            {"metric": "euclidean", "temperature": 5.0, "dropout_scope": "batch"},
        ),
        (7,),
        trainable=7,
        full_precision=True,
    ),
    LayerCase(
        "sphere_conv2d_learnable_sigmoid",
        functools.partial(
            layers.SphereConv2D, 6, 3, groups=2, response="learnable_sigmoid"
        ),
        IMAGE,
        trainable=2,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "sphere_dense",
        functools.partial(
            layers.SphereDense, 5, "tanh", use_bias=True, response="learnable_sigmoid"
        ),
        (4, 7),
        trainable=3,
    ),
    *(
        LayerCase(
            f"global_{similarity}",
            functools.partial(layers.GlobalNeuralSimilarity2D, similarity=similarity),
            IMAGE,
            trainable=trainable,
            data_formats=FIRST,
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
    LayerCase(
        "conv1d_static_causal_positive_semidefinite",
        functools.partial(
            layers.NeuralSimilarityConv1D,
            6,
            3,
            padding="causal",
            dilation_rate=2,
            similarity="positive_semidefinite",
        ),
        (9, 4),
        trainable=3,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv1d_dynamic_shared_pooled",
        with_predictor(
            shared(pooled=True),
            layers.NeuralSimilarityConv1D,
            filters=6,
            kernel_size=3,
            padding="same",
        ),
        (9, 4),
        trainable=5,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_static_sparse_learned_shape",
        convolution(similarity=similarities.Sparse(5), learn_shape=True),
        IMAGE,
        trainable=4,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv2d_static_full",
        convolution(similarity="full", groups=2, padding="same"),
        IMAGE,
        trainable=3,
        data_formats=FIRST,
    ),
    LayerCase(
        "conv2d_dynamic_shared",
        with_predictor(shared(), convolution(strides=2, learn_shape=True)),
        IMAGE,
        trainable=6,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv3d_static_symmetric",
        functools.partial(
            layers.NeuralSimilarityConv3D, 6, 2, padding="same", similarity="symmetric"
        ),
        (5, 4, 3, 2),
        trainable=3,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "conv3d_dynamic_sphere",
        functools.partial(
            layers.NeuralSimilarityConv3D, 6, (2, 3, 1), strides=2, predictor="sphere"
        ),
        (5, 4, 3, 2),
        trainable=8,
        non_trainable=6,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "depthwise_conv2d_static",
        functools.partial(
            layers.NeuralSimilarityDepthwiseConv2D,
            3,
            strides=2,
            padding="same",
            depth_multiplier=2,
            similarity="unconstrained",
        ),
        IMAGE,
        trainable=3,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "depthwise_conv2d_dynamic_sphere",
        functools.partial(
            layers.NeuralSimilarityDepthwiseConv2D,
            (2, 3),
            depth_multiplier=2,
            similarity="symmetric",
            predictor="sphere",
        ),
        IMAGE,
        trainable=4,
        data_formats=FIRST,
        unknown_sizes=True,
    ),
    LayerCase(
        "meta_neighborhood_head_regression",
        head("dual", {"metric": "euclidean", "temperature": 5.0}, task="regression"),
        (7,),
        trainable=5,
        full_precision=True,
    ),
    LayerCase(
        "neighbor_dictionary_given_values",
        functools.partial(
            layers.NeighborDictionary,
            *(4, 1),
            fixed_values=[[0.5], [-1.0], [2.0], [0.0]],
            task="regression",
            seed=1,
            dropout=0.25,
        ),
        (7,),
        trainable=1,
    ),
    LayerCase(
        "dense_static_blocks",
        functools.partial(
            layers.NeuralSimilarityDense, 5, similarity="unconstrained", block_size=3
        ),
        (2, 12),
        trainable=3,
    ),
    LayerCase(
        "dense_dynamic_sphere",
        functools.partial(layers.NeuralSimilarityDense, 5, "tanh", predictor="sphere"),
        (12,),
        trainable=8,
        non_trainable=6,
    ),
    LayerCase(
        "dense_dynamic_cnn_blocks",
        functools.partial(
            layers.NeuralSimilarityDense,
            *(5, None, False),
            similarity="symmetric",
            block_size=4,
            predictor="cnn",
            learn_shape=True,
        ),
        (2, 12),
        trainable=6,
        non_trainable=3,
    ),
    LayerCase(
        "simple_rnn_static",
        recurrent(layers.NeuralSimilaritySimpleRNNCell, similarity="symmetric"),
        (4, 6),
        trainable=5,
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
        trainable=5,
    ),
    LayerCase(
        "gru_dynamic_sphere",
        recurrent(layers.NeuralSimilarityGRUCell, predictor="sphere"),
        (4, 6),
        trainable=7,
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
        trainable=5,
    ),
]
