"""A model that finetunes its head on learned neighbors, trained with `fit`."""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import backend, graphs, nesting, validation
from nsl_keras.backend import Tensor, at_least_float32, variable_scope
from nsl_keras.neighborhoods.dictionary import NeighborDictionary, classes_of
from nsl_keras.neighborhoods.head import MetaNeighborhoodHead, Neighbors
from nsl_keras.neighborhoods.splitting import split_classifier
from nsl_keras.training import data
from nsl_keras.training.checks import CheckedModel


@keras.saving.register_keras_serializable("nsl_keras")
class MetaNeighborhoodModel(CheckedModel):
    """Backbone, then a head finetuned per example on a learned dictionary of neighbors.

    For features `z = backbone(x)`, dictionary `{(k_j, v_j)}` and head weights `phi`,

        phi_z = phi - rate * d/dphi sum_j softmax_j(sim(z, k_j) / T) L(f_phi(k_j), v_j)
        model(x) = f_{phi_z}(z)

    Backbone, head, keys, values and the inner learning rate `rate` are all trained on the
    loss of `model(x)`, through the finetuning.

    To measure what adaptation adds, also compile and evaluate `unadapted`. It is no
    baseline: compare with the plain model, trained in the same way. If adaptation changes
    nothing, look at `inner_learning_rates`, which training may have driven to zero.

    The authors do not decay the dictionary, head or inner learning rates. To do the same,
    call `optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)`, also
    after loading (in `mixed_float16`, on `model.optimizer.inner_optimizer`). The published
    decay of 7.5e-5 at a learning rate of 1e-3 is `weight_decay=0.075` of Keras's AdamW.

    Args:
        backbone: Keras layer or model from inputs to features of shape `(batch, features)`,
            or `None` if the inputs are the features. The paper's backbones have no last
            ReLU, so features may be negative, like keys.
        head: See `MetaNeighborhoodHead`.
        dictionary: See `MetaNeighborhoodHead`.
        name: str or `None`, the name of the model.
        dtype: The dtype policy of head and dictionary.
        trainable: bool, whether the model is trained.
        **kwargs: Arguments of `MetaNeighborhoodHead`, such as `inner_steps` and `task`.

    Call arguments:
        training: bool, the training mode of backbone and dictionary.
        adapt: bool; if false, the head predicts without adaptation.

    Attributes:
        neighborhood: The `MetaNeighborhoodHead`.
        head, dictionary: Its head before it is finetuned, and its `NeighborDictionary`.
        num_neighbors: The number of dictionary entries `S`.

    Input shape:
        Same as the backbone; `(batch, features)` without one.

    Output shape:
        `(batch, classes)`, logits: compile with a loss that has `from_logits=True`. In
        regression `(batch, outputs)`.

    Raises:
        ValueError: See `MetaNeighborhoodHead`; at `compile`, for a classifier's loss of
            probabilities; at `fit` and `evaluate`, for NaN, infinities, and bad targets.
        NonFiniteLossError: At `fit`, when the loss is not finite. `predict` does not raise.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     keras.layers.Dense(32), nsl_keras.layers.CosineDense(3), dictionary=50)
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile("adam", loss, metrics=["accuracy"])
    >>> x, y = keras.random.normal((16, 8), seed=0), keras.ops.arange(16) % 3
    >>> sorted(model.fit(x, y, verbose=0).history)
    ['accuracy', 'loss']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2, Eq. (1)-(3), Algorithm
        1; defaults from Appendix A.2. Initial rate, keys and values follow the authors'
        code. The paper uses 1,000 entries for regression, 5,000 and 10,000 for images.
    """

    #: What conversions change: not the head, which is finetuned.
    converted_part = property(attrgetter("backbone"))
    head = property(attrgetter("neighborhood.head"))
    dictionary = property(attrgetter("neighborhood.dictionary"))
    num_neighbors = property(attrgetter("dictionary.num_neighbors"))
    test_function: Any
    predict_function: Any

    def __init__(
        self,
        backbone: keras.layers.Layer | None,
        head: keras.layers.Layer,
        dictionary: NeighborDictionary | int = 1000,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        # Without autocast: integers and wide floats reach the backbone as they are.
        super().__init__(name=name, dtype=dtype, trainable=trainable, autocast=False)
        is_valid = backbone is None or isinstance(backbone, keras.layers.Layer)
        demand = "a Keras layer or model, or None"
        validation.require(is_valid, "backbone", demand, backbone)
        self.backbone = backbone
        kwargs |= {"dtype": self.dtype_policy, "name": "neighborhood"}
        self.neighborhood = MetaNeighborhoodHead(head, dictionary, **kwargs)
        self.task = self.neighborhood.task
        self.classifies = self.task == "classification"
        # Functions, since Keras would track and save the models that they return.
        self._unadapted = functools.cache(self._make_unadapted)
        self._ranking = functools.cache(self._make_ranking)
        #: Whether the next batch must compute the constants.
        self._constants_are_due = True

    @property
    def unadapted(self) -> keras.Model:
        """The model with `adapt=False`, as a plain Keras model on the same weights.

        It is not compiled. Before this model is built, it raises a `ValueError`.
        """
        validation.require_built(self, "unadapted")
        return self._unadapted()

    @classmethod
    def from_classifier(
        cls, model: keras.Model, dictionary: NeighborDictionary | int = 1000, **options: Any
    ) -> MetaNeighborhoodModel:
        """Returns a built model whose head is the last dense layer of a trained model.

        The layers before it are the backbone; a final softmax is dropped. Layers and
        weights are copied, and `model` does not change. With a small `inner_learning_rate`
        predictions change little at first; `initialize_from` fills the dictionary.

        Args:
            model: A built functional or Sequential model with one output that ends in
                `Dense`, `CosineDense` or a 1x1 convolution of a 1x1 map, optionally with a
                softmax; one output with a sigmoid becomes two logits. With
                `task="regression"` it must be linear. Others raise a `ValueError`.
            dictionary: See `MetaNeighborhoodHead`.
            **options: Further arguments of `MetaNeighborhoodModel`.

        Example:

        >>> import keras
        >>> import nsl_keras
        >>> trained = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=4)
        >>> model = nsl_keras.MetaNeighborhoodModel.from_classifier(trained, 50)
        >>> tuple(model(keras.ops.ones((2, 32, 32, 3))).shape)
        (2, 4)
        """
        softmax = options.get("task", "classification") == "classification"
        backbone, head = split_classifier(model, softmax)
        made = cls(backbone, head, dictionary, **options)
        made.build(model.input_shape)
        return made

    def build(self, input_shape: Any) -> None:
        if self.built:
            return  # Traced functions read the constants, which must stay the same.
        self.compute_output_shape(input_shape)
        self.neighborhood.constants.build()
        nesting.pass_on_frozen(self)

    def call(self, inputs: Any, training: bool | None = None, adapt: bool = True) -> Any:
        features = self.features(inputs, training=training)  # MN Algorithm 1, line 5.
        # MN Algorithm 1, lines 6 and 7.
        return self.neighborhood(features, training=training, adapt=adapt)

    def features(self, inputs: Any, training: bool | None = None) -> Tensor:
        """Returns the features `z` of a batch, of shape `(batch, features)`."""
        if self.backbone is None:
            return ops.convert_to_tensor(inputs, sparse=False)
        return self.backbone(inputs, training=training)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        # Called symbolically, because subclassed backbones may only build when called.
        inputs = _inputs_of_shapes(input_shape)
        if self.backbone is not None:
            inputs = graphs.output_spec(self.backbone, inputs)
        return tuple(self.neighborhood(inputs).shape)

    def _check_data(self, x: Any, y: Any = None) -> None:
        x, y = data.gather(x, y)
        for path, leaf in tree.flatten_with_path(x):
            validation.require_finite(leaf, "x" + "".join(f"[{part!r}]" for part in path))
        if not self.built:
            shapes = data.map_arrays(lambda each: (None, *np.shape(each)[1:]), x)
            with variable_scope(self):  # The head knows the number of classes then.
                self.build(shapes)
        if y is not None:
            self.dictionary.require_targets(y)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training, as in Keras; the loss of a classifier must take logits."""
        super().compile(*args, **kwargs)
        self._ranking.cache_clear()  # Layers may have changed, as by `enable_lora`.

    def make_test_function(self, force: bool = False) -> Any:
        super().make_test_function(force)
        self.test_function = self._computing_once(self.test_function, "test_step")
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        super().make_predict_function(force)
        self.predict_function = self._computing_once(self.predict_function, "predict_step")
        return self.predict_function

    def _computing_once(self, function: Any, step: str) -> Any:
        """Returns a function of a batch that reads the constants.

        A subclass's own step may change weights, so its function stays as it is; so does a
        function that already reads them.
        """
        self._constants_are_due = True
        is_overridden = getattr(type(self), step) is not getattr(keras.Model, step)
        if is_overridden or isinstance(function, functools.partial):
            return function
        return functools.partial(self._on_constants, function)

    def _on_constants(self, function: Any, *arguments: Any) -> Any:
        """Calls a function of a batch; the first one of a `predict` computes constants."""
        constants = self.neighborhood.constants
        if not self.built:  # The function is about to build it.
            return function(*arguments)
        if self._constants_are_due:
            arguments = backend.update_before(self, constants.update, arguments)
            self._constants_are_due = False
        with constants.used(update=False):
            return function(*arguments)

    def train_step(self, *arguments: Any) -> Any:
        """Runs one step of the paper's Algorithm 1; on JAX, Keras's equal `train_step`."""
        if keras.backend.backend() == "jax":
            return super().train_step(*arguments)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(*arguments)
        with backend.GradientTape() as outer_tape:
            # The call finetunes the head on a tape of its own: `NestedTape._finetune` or
            # `DualForm._traces`.
            predictions = self(x, training=True)
            # MN Algorithm 1, line 9; MN Eq. (2).
            loss = self.compute_loss(x, y, predictions, sample_weight)
            scaled_loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        gradients = outer_tape.gradient(scaled_loss, weights)
        self.optimizer.apply(gradients, weights)  # MN Algorithm 1, line 10.
        # Under `tf.distribute` Keras has divided the loss by the number of replicas.
        whole = loss * self.distribute_strategy.num_replicas_in_sync
        for metric in self.metrics:  # A subclass may leave the loss out.
            if metric.name == "loss":
                metric.update_state(whole, sample_weight=ops.shape(predictions)[0])
        return self.compute_metrics(x, y, predictions, sample_weight)

    def initialize_from(
        self, x: Any, y: Any = None, seed: int | None = None, **options: Any
    ) -> np.ndarray:
        """Sets the dictionary's entries to examples, drawn at random without replacement.

        Features of the drawn examples become the keys. Their targets, or their labels
        smoothed by 1 % so that training can still change them, become the values. Classes
        get equal shares of the entries; if a class has too few examples, other classes fill
        up.

        Train the backbone first. Learned inner learning rates are lowered until a step on
        an entry of average norm does not overshoot.

        Args:
            x: Inputs, as for `fit`, or a finite data set, which is held in memory.
            y: Class numbers, of shape `(n,)` or `(n, 1)`; or class probabilities or
                targets, of shape `(n, outputs)`; `None` if a data set yields them.
            seed: int or `None`, the seed of the draw.
            **options: `batch_size` (128) and `verbose` of `keras.Model.predict`.

        Returns:
            NumPy array `(num_neighbors,)`, the index of each entry's example.

        Raises:
            ValueError: For fewer examples than entries, missing or bad labels or targets,
                NaN and infinities, and a dictionary of fixed values.

        Example:

        >>> import keras
        >>> import nsl_keras
        >>> model = nsl_keras.MetaNeighborhoodModel(
        ...     None, keras.layers.Dense(3), dictionary=6)
        >>> x, y = keras.random.normal((30, 4), seed=0), keras.ops.arange(30) % 3
        >>> model.initialize_from(x, y, seed=0).shape
        (6,)
        """
        x, y = data.gather(x, y)
        demand = "given, or come with the data set as (x, y)"
        validation.require(y is not None, "y", demand, y)
        self._check_data(x, y)
        examples = len(data.leaves(x)[0])
        with variable_scope(self):  # Workers share the state of a seed made there.
            drawn = self.dictionary.draw_examples(y, examples, seed)
        chosen = data.map_arrays(lambda each: each[drawn], x)
        features = self._features_of(chosen, **options)
        self.dictionary.assign_examples(features, y[drawn])
        self.neighborhood.limit_rates()
        return drawn

    def neighbors(
        self,
        x: Any,
        k: int = 5,
        by: str = "attention",
        effects: bool = False,
        **options: Any,
    ) -> Neighbors:
        """Returns the entries that each example attends to most, or that affect it most.

        For training examples that look like them, see `nearest_examples`.

        Args:
            x: Inputs, as for `predict`.
            k: int, the number of entries; at most `num_neighbors`.
            by: `"attention"` returns the entries of largest weight, which are most similar
                to the example. `"effect"` returns those whose `output_changes` are largest,
                in absolute value summed over the outputs: hard examples, often of other
                classes, since an entry that the head fits already has no effect.
            effects: bool, whether to compute `output_changes` with `by="attention"` too.
                They take more time and memory than `predict`.
            **options: `batch_size`, `steps` and `verbose` of `keras.Model.predict`.

        Returns:
            `nsl_keras.neighborhoods.head.Neighbors`, which describes its arrays.

        Raises:
            ValueError: For an invalid `k` or `by`, or if the model is not built.

        Example:

        >>> import keras
        >>> import nsl_keras
        >>> model = nsl_keras.MetaNeighborhoodModel(
        ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
        >>> model.build((None, 6))
        >>> model.neighbors(keras.ops.ones((4, 6)), k=5).values.shape
        (4, 5, 3)
        """
        self.neighborhood.require_ranking(k, by, effects)
        with self.neighborhood.constants.used():
            found = self._ranking(k, by, effects, self.run_eagerly).predict(x, **options)
        return Neighbors(**{"output_changes": None, **found})

    def neighbors_of_batch(
        self, inputs: Any, k: int, by: str = "attention", effects: bool = False
    ) -> Neighbors:
        """Returns `neighbors` of a batch as tensors, for use in a function of your own."""
        return self.neighborhood.neighbors(self.features(inputs), k, by, effects)

    def nearest_examples(self, x: Any, y: Any = None, **options: Any) -> np.ndarray:
        """Returns the index of the example nearest to each entry, by the key metric.

        Args:
            x: Examples to choose from, for instance the training inputs.
            y: Labels, or `None`. With labels, each entry of a classifier gets the nearest
                example of the most probable class of its value. A regressor ignores labels.
            **options: `batch_size` (128), `steps` and `verbose` of `keras.Model.predict`.

        Raises:
            ValueError: If the model is not built, or labels do not fit or omit a class.

        Example:

        >>> import numpy as np
        >>> import nsl_keras
        >>> model = nsl_keras.MetaNeighborhoodModel(
        ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
        >>> x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
        >>> model.build(x.shape)
        >>> nearest = model.nearest_examples(x, np.arange(40) % 3)
        >>> x[nearest[model.neighbors(x[:4], k=5).indices]].shape
        (4, 5, 6)
        """
        validation.require_built(self, "nearest_examples")
        features = at_least_float32(self._features_of(x, **options))
        keys, values = self.dictionary.keys, self.dictionary.values
        classes, labels = np.zeros(self.num_neighbors), np.zeros(len(features))
        if y is not None and self.classifies:
            self.dictionary.require_targets(y)
            validation.require_one_per_example(y, len(features), "y")
            classes, labels = ops.convert_to_numpy(ops.argmax(values, 1)), classes_of(y)
            missing = np.setdiff1d(classes, labels)
            demand = "labels of all classes that entries have"
            validation.require(not missing.size, "y", demand, f"no label {missing}")

        def nearest(entries: list[Tensor]) -> Tensor:
            scores = self.dictionary.metric(features, entries[0])
            same_class = ops.equal(labels[:, None], entries[1][None])
            return ops.argmax(ops.where(same_class, scores, -np.inf), axis=0)

        entries = [ops.convert_to_numpy(keys), classes]
        return np.asarray(data.predict(nearest, self, entries))

    def _features_of(self, x: Any, **options: Any) -> Any:
        return data.predict(self.features, self, x, **{"batch_size": 128, **options})

    def _make_unadapted(self) -> keras.Model:
        if graphs.is_graph(self.backbone):
            inputs, features = graphs.symbols_of(self.backbone)
        else:
            shapes = self.get_build_config()["input_shape"]
            inputs = _inputs_of_shapes(shapes, lambda shape: keras.Input(shape[1:]))
            features = self.features(inputs)
        return keras.Model(inputs, self.head(features), name=f"{self.name}_unadapted")

    def _make_ranking(
        self, k: int, by: str, effects: bool, run_eagerly: bool
    ) -> data.BatchFunction:
        def ranking(inputs: Any) -> dict[str, Tensor]:
            found = self.neighbors_of_batch(inputs, k, by, effects)._asdict()
            return {name: each for name, each in found.items() if each is not None}

        return data.BatchFunction(ranking, self, run_eagerly)

    @property
    def decay_exempt_variables(self) -> list[Any]:
        """Head, dictionary and inner learning rates, which the authors do not decay."""
        validation.require_built(self, "decay_exempt_variables")
        return self.neighborhood.trainable_variables

    @property
    def inner_learning_rates(self) -> list[Tensor]:
        """The current inner learning rates, one per adapted variable."""
        validation.require_built(self, "inner_learning_rates")
        return self.neighborhood.learning_rate.rates()

    @functools.wraps(keras.Model.export)
    def export(
        self, filepath: Any, format: str = "tf_saved_model", *args: Any, **kwargs: Any
    ) -> None:
        validation.require_built(self, "export")
        head = self.neighborhood
        demand = (
            'other than "onnx" for a head that adapts on a nested tape or in several '
            "steps: ONNX has no operations for its gradients"
        )
        fits = head.inner_steps == 1 and head.active_inner_loop == "dual"
        validation.require(fits or format != "onnx", "format", demand, format)
        # Keras refuses a model that was never called, as after loading.
        self(_inputs_of_shapes(self.get_build_config()["input_shape"]))
        with self.neighborhood.constants.used():
            super().export(filepath, format, *args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes the backbone, but not the head, which is finetuned."""
        if self.backbone is not None:
            self.backbone.quantize(*args, **kwargs)
        nesting.forget_functions(self)

    def forget_functions(self) -> None:
        """Drops the functions of models that this model made of its layers."""
        if self.built:
            nesting.forget_functions(self.unadapted)
        self._ranking.cache_clear()

    def get_config(self) -> dict[str, Any]:
        backbone = keras.saving.serialize_keras_object(self.backbone)
        own = super().get_config()
        return {**self.neighborhood.get_config(), **own, "backbone": backbone}


def _inputs_of_shapes(shapes: Any, make: Any = keras.KerasTensor) -> Any:
    return tree.map_shape_structure(lambda shape: shape and make(shape), shapes)
