"""Which of the processes that train a model together writes files."""

from __future__ import annotations

import keras


def is_first_process(model: keras.Model) -> bool:
    """Whether this process is the first of those that train the model, or the only one."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.process_index() == 0
    resolver = getattr(model.distribute_strategy, "cluster_resolver", None)
    if resolver is None or resolver.task_type in (None, "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and resolver.task_id == 0 and not has_chief
