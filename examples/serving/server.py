"""Serves every model of a folder by the Open Inference Protocol, in REST and gRPC.

    python -m examples.serving.server saved_models

    curl localhost:8080/v2/health/ready
    curl localhost:8080/v2/models/digits_static
    curl localhost:8082/metrics

docs/guides/serving.md shows requests. Install the extra `serving` first.
"""

from __future__ import annotations

import asyncio
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags, logging
from mlserver import MLServer, Settings

from examples.serving.runtime import VersionedFolder

FLAGS = flags.FLAGS


async def serve(root: str, metrics_dir: str) -> None:
    settings = Settings(
        model_repository_root=root,
        model_repository_implementation=VersionedFolder,
        host=FLAGS.host,
        http_port=FLAGS.http_port,
        grpc_port=FLAGS.grpc_port,
        metrics_port=FLAGS.metrics_port,
        metrics_dir=metrics_dir,
        parallel_workers=0,  # TensorFlow has threads of its own.
        debug=False,
    )
    models = await VersionedFolder(root).list()
    if not models:
        logging.warning("No NAME/VERSION/saved_model.pb in the folder %r.", root)
    await MLServer(settings).start(models)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError("Name one folder of models, as saved_models.")
    with tempfile.TemporaryDirectory() as metrics_dir:
        asyncio.run(serve(arguments[1], metrics_dir))


if __name__ == "__main__":
    flags.DEFINE_string("host", "127.0.0.1", "Address; 0.0.0.0 for all of the machine's.")
    flags.DEFINE_integer("http_port", 8080, "Port of REST.")
    flags.DEFINE_integer("grpc_port", 8081, "Port of gRPC.")
    flags.DEFINE_integer("metrics_port", 8082, "Port of Prometheus's metrics.")
    app.run(main)
