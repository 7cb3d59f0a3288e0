# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From `fit` to a served model
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/nsl-keras/nsl_keras/blob/main/examples/notebooks/serving.ipynb)
#
# You train a classifier with learned neighbours, and the same network without them. You save
# it, load it in another process, export it for servers, and ask it over HTTP; the server has
# neither Keras nor this package. Then you measure what the neighbours cost there.
#
# No GPU and no download is needed.

# %% [markdown]
# ## Setup
#
# Where the package is missing, this cell installs it: from the clone that the notebook lies
# in, from a wheel beside it, or from the repository. Elsewhere it does nothing.

# %%
import importlib.util
import pathlib

if importlib.util.find_spec("nsl_keras") is None:
    source = "git+https://github.com/nsl-keras/nsl_keras"
    clone = pathlib.Path("../..").resolve()
    wheels = sorted(pathlib.Path().glob("nsl_keras-*.whl"))
    if (clone / "nsl_keras").is_dir():
        source = clone.as_uri()
    elif wheels:
        source = wheels[-1].resolve().as_uri()
    # %pip install -q "nsl_keras[tensorflow,examples] @ {source}"

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import json
import subprocess
import sys
import tempfile
import time
import urllib.request

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nsl_keras

# %matplotlib inline
SHORT = "NSL_KERAS_SHORT" in os.environ  # A few steps only, for the tests.
tf.get_logger().setLevel("ERROR")
keras.utils.set_random_seed(0)
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## Train
#
# Scikit-learn's scanned digits, 8 by 8 pixels, and a weak backbone: one linear layer. As in the
# paper, head, dictionary and inner rate are not decayed.

# %%
digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(
    images, digits.target, test_size=600, stratify=digits.target, random_state=0
)


def backbone():
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(32)]
    return keras.Sequential(layers)


keras.utils.set_random_seed(0)
plain = keras.Sequential([backbone(), nsl_keras.layers.CosineDense(10)])
model = nsl_keras.MetaNeighborhoodModel(
    backbone(), nsl_keras.layers.CosineDense(10), dictionary=200
)
model.build((None, 8, 8, 1))
history = {}
for name, each in (("without", plain), ("with neighbours", model)):
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.075)
    if each is model:
        optimizer.exclude_from_weight_decay(var_list=model.decay_exempt_variables)
    each.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history[name] = each.fit(
        train_x,
        train_y,
        batch_size=64,
        epochs=2 if SHORT else 25,
        validation_data=(test_x, test_y),
        verbose=0,
    ).history

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name, logs in history.items():
    axis.plot(100 * np.array(logs["val_accuracy"]), label=name)
axis.plot(
    100 * np.array(history["with neighbours"]["val_unadapted_accuracy"]),
    ":",
    label="before adaptation",
)
axis.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(60, 100))
axis.legend()
last = {name: 100 * logs["val_accuracy"][-1] for name, logs in history.items()}
gain = last["with neighbours"] - last["without"]
print(", ".join(f"{name} {found:.1f} %" for name, found in last.items()))
print(f"difference {gain:+.1f} points, from one seed")

# %% [markdown]
# ## Save, and load in another process
#
# A `.keras` file holds the whole model, with its optimizer. `import nsl_keras` before you load
# it, so that Keras knows the layers.

# %%
model.save(folder / "digits.keras")
np.save(folder / "images.npy", test_x[:4])
code = """
import sys
import keras, numpy as np
import nsl_keras

folder = sys.argv[1]
model = keras.saving.load_model(f"{folder}/digits.keras")
print(model.predict(np.load(f"{folder}/images.npy"), verbose=0).argmax(axis=1).tolist())
"""
package = str(pathlib.Path(nsl_keras.__file__).parents[1])
environment = {**os.environ, "PYTHONPATH": package}
loaded = subprocess.run(
    [sys.executable, "-c", code, str(folder)],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
)
print("here ", model.predict(test_x[:4], verbose=0).argmax(axis=1).tolist())
print("there", loaded.stdout.strip())

# %% [markdown]
# ## Export
#
# `save_model` writes a SavedModel into a numbered folder, as servers expect it; it takes any batch
# size. With neighbours it has a second signature, `unadapted`: the predictions without the
# step. For other engines there are `model.export("model.onnx", format="onnx")` and
# `model.export("model.tflite", format="litert")`.

# %%
for name, each in (("plain", plain), ("digits", model)):
    path = nsl_keras.export.save_model(each, folder / name, version=1)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"{name}: {sorted(file.name for file in path.iterdir())}, {size / 2**20:.2f} MiB")

signatures = tf.saved_model.load(str(folder / "digits" / "1")).signatures
for name in ("serving_default", "unadapted"):
    signature = signatures[name]
    (argument,) = signature.structured_input_signature[1]
    (logits,) = signature(**{argument: tf.constant(test_x)}).values()
    right = 100 * np.mean(logits.numpy().argmax(axis=1) == test_y)
    print(f"{name}: {right:.1f} % of the test images")

# %% [markdown]
# ## Serve
#
# A server of thirty lines with the protocol of TensorFlow Serving: the answer to a `POST` of
# `{"instances": [...]}` is `{"predictions": [...]}`. It blocks imports of Keras and of this
# package, to show that a SavedModel needs neither. In production use TensorFlow Serving
# itself, which reads the same folder.

# %%
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

for name in ("keras", "nsl_keras"):
    sys.modules[name] = None  # Every import of it fails.

import tensorflow as tf

serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
(argument,) = serve.structured_input_signature[1]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        images = tf.constant(json.loads(body)["instances"], tf.float32)
        (logits,) = serve(**{argument: images}).values()
        answer = json.dumps({"predictions": logits.numpy().tolist()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def start(name):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder / name / "1")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return (
        process,
        f"http://127.0.0.1:{int(process.stdout.readline())}/v1/models/{name}:predict",
    )


def ask(url, batch):
    body = json.dumps({"instances": batch.tolist()}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
        return np.array(json.load(answer)["predictions"])


servers = {name: start(name) for name in ("plain", "digits")}
answered = ask(servers["digits"][1], test_x[:10])
print("answered", answered.argmax(axis=1))
print("correct ", test_y[:10])
difference = np.abs(answered - model.predict(test_x[:10], verbose=0)).max()
print(f"largest difference to the model here: {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# ## What the neighbours cost there
#
# Requests of one image, one after the other, HTTP and JSON included; both servers in turn.

# %%
times = {name: [] for name in servers}
for image in test_x[: 10 if SHORT else 200]:
    for name, (_, url) in servers.items():
        begin = time.perf_counter()
        ask(url, image[np.newaxis])
        times[name].append(1000 * (time.perf_counter() - begin))
for process, _ in servers.values():
    process.terminate()
    process.wait()

figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
axis.boxplot(list(times.values()), orientation="horizontal", showfliers=False, widths=0.6)
axis.set_yticks([1, 2], ["without", "with neighbours"])
axis.set_xlabel("milliseconds for a request of one image")
medians = {name: np.median(each) for name, each in times.items()}
print(
    f"median {medians['plain']:.2f} ms without, {medians['digits']:.2f} ms with neighbours: "
    f"{medians['digits'] / medians['plain']:.2f} times"
)

# %% [markdown]
# On this weak backbone the neighbours gain, and a request costs little more, since most of its
# time is HTTP. The cost grows with the entries: `make bench` measures it alone.
#
# ## Where to go from here
#
# * TensorFlow Serving: `docker run -p 8501:8501 -v "$PWD/digits:/models/digits" -e
#   MODEL_NAME=digits tensorflow/serving`.
# * A model with static similarities folds first: `convert.fold(model)`, then it is plain Keras.
#
# Notebook 4 of 5. Before: [Few-shot learning](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/few_shot.ipynb). Next: [What dynamic similarity sees](https://github.com/nsl-keras/nsl_keras/blob/main/examples/notebooks/pictures.ipynb).
