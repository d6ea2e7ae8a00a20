"""Samples a second of the models of `cargo xtask bench train` under TensorFlow's strategies: one line of JSON.

usage: tf_train.py STRATEGY MODEL BATCH SECONDS; STRATEGY is mirrored, of two logical CPUs in this process, or workers, of
the processes of TF_CONFIG by RING. One thread for each replica.
"""
import json
import os
import resource
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
import numpy as np
import tensorflow as tf

WIDTH, HEADS, TOKENS, VOCABULARY, BATCHES, WARM_UP = 128, 4, 32, 96, 32, 20
WORDS, WORD_WIDTH = 100_000, 64
layers = tf.keras.layers

kind, name, batch, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank = int(os.environ.get("RANK", "0"))
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2 if kind == "mirrored" else 1)
if kind == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def mlp():
    return tf.keras.Sequential([
        tf.keras.Input((784,)), layers.Dense(256, "relu"), layers.Dense(128, "relu"), layers.Dense(10)])


def cnn():
    return tf.keras.Sequential([
        tf.keras.Input((784,)), layers.Reshape((28, 28, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(10)])


class Transformer(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(VOCABULARY, WIDTH), layers.Embedding(TOKENS, WIDTH)
        self.blocks = []
        for _ in range(2):
            norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
            self.blocks.append([*norms, layers.MultiHeadAttention(HEADS, WIDTH // HEADS),
                                layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)])
        self.norm, self.head = layers.LayerNormalization(epsilon=1e-5), layers.Dense(VOCABULARY)

    def call(self, x):
        x = self.tokens(x) + self.positions(tf.range(TOKENS))
        for first, second, attention, up, down in self.blocks:
            normed = first(x)
            x = x + attention(normed, normed, use_causal_mask=True)
            x = x + down(up(second(x)))
        return tf.reshape(self.head(self.norm(x)), (-1, VOCABULARY))


def embedding():
    return tf.keras.Sequential([
        tf.keras.Input((TOKENS,), dtype=tf.int32), layers.Embedding(WORDS, WORD_WIDTH),
        layers.GlobalAveragePooling1D(), layers.Dense(10)])


def resnet():
    """ResNet-20 for pictures of 32 x 32, with shortcuts that are subsampled and padded with zeros."""
    convolution = lambda width, stride: layers.Conv2D(
        width, 3, strides=stride, padding="same", use_bias=False, kernel_initializer="he_normal")
    pictures = tf.keras.Input((3 * 32 * 32,))
    x = layers.Permute((2, 3, 1))(layers.Reshape((3, 32, 32))(pictures))
    x = layers.ReLU()(layers.BatchNormalization()(convolution(16, 1)(x)))
    for stage, width in enumerate([16, 32, 64]):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(layers.BatchNormalization()(convolution(width, stride)(x)))
            y = layers.BatchNormalization()(convolution(width, 1)(y))
            if stride == 2:
                x = layers.Lambda(lambda x: tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, x.shape[-1]]]))(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    return tf.keras.Model(pictures, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def examples():
    """The examples of all batches, the same as those of the other libraries."""
    rows = BATCHES * batch
    if name == "transformer":
        at = np.arange(TOKENS + 1) + 17 * np.arange(rows)[:, None]
        tokens = ((at * at + 31 * at) % 1009 % VOCABULARY).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    labels = (np.arange(rows) * 7 % 10).astype(np.int32)
    if name == "embedding":
        return (np.arange(rows * TOKENS) * 2654435761 % WORDS).astype(np.int32).reshape(rows, -1), labels
    pixels = 3 * 32 * 32 if name == "resnet" else 784
    return (np.arange(rows * pixels) * 2654435761 % 1000 / 1000).astype(np.float32).reshape(rows, -1), labels


inputs, targets = examples()
with strategy.scope():
    models = {"mlp": mlp, "cnn": cnn, "transformer": Transformer, "embedding": embedding, "resnet": resnet}
    model = models[name]()
    # Variables that a graph creates itself cannot be mirrored over logical CPUs.
    model(tf.constant(inputs[:2]))
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def step(batch):
    def replica(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = loss_of(tf.reshape(y, (-1,)), model(x, training=True))
            loss = tf.nn.compute_average_loss(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    strategy.run(replica, args=(batch,))


def of_replica(context):
    """The batches of one replica; each begins at another one."""
    first = (context.input_pipeline_id if kind == "workers" else 0) * batch
    return tf.data.Dataset.from_tensor_slices(
        (np.roll(inputs, -first, 0), np.roll(targets, -first, 0))).repeat().batch(batch, drop_remainder=True).prefetch(2)


batches = iter(strategy.distribute_datasets_from_function(of_replica))


def steps(count):
    started = time.perf_counter()
    for _ in range(count):
        step(next(batches))
    return time.perf_counter() - started


steps(1)
first_step_s = time.time() - float(os.environ["XTASK_BENCH_STARTED"])
steps(WARM_UP - 1)
estimate = steps(WARM_UP) / WARM_UP
# All workers make the same number of steps.
estimate = float(strategy.reduce(tf.distribute.ReduceOp.MEAN, tf.constant(estimate), axis=None))
count = max(int(limit / estimate), 5)
seconds = steps(count)
if rank == 0:
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    samples_per_s = count * batch * strategy.num_replicas_in_sync / seconds
    line = {"samples_per_s": samples_per_s, "peak_mib": peak_mib, "first_step_s": first_step_s}
    print(json.dumps(line), flush=True)
