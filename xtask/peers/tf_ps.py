"""Training steps by TensorFlow's ParameterServerStrategyV2 and ClusterCoordinator; the chief prints one JSON line.

Usage, once per task of a cluster of one chief, workers and ps: TF_CONFIG=... tf_ps.py SECONDS [mlp|embedding [STEPS]]

STEPS is the number of training steps in each scheduled function, 1 if absent. Workers and ps serve until they are
killed. The optimizers are operations on the ps that hold the variables, so that only gradients travel there.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import tensorflow as tf

BATCH = 64
SIZES = [784, 256, 128, 10]
ROWS, DIMENSIONS, IDS, CLASSES = 100_000, 64, 32, 2

seconds = float(sys.argv[1])
name = sys.argv[2] if len(sys.argv) > 2 else "mlp"
if name not in ("mlp", "embedding"):
    sys.exit(f"model {name!r} is not known; give mlp or embedding")
embedding = name == "embedding"
steps_per_function = int(sys.argv[3]) if len(sys.argv) > 3 else 1

# One thread per operation, since all tasks share the cores; inter-op parallelism of 1 would hang.
tf.config.threading.set_intra_op_parallelism_threads(1)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
cluster = resolver.cluster_spec()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        cluster,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1),
    ).join()

# Splitting the largest matrix of the perceptron costs more than it balances; the table must be split.
partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=cluster.num_tasks("ps"))
strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner if embedding else None)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
random = np.random.default_rng(0)


def variable(shape, deviation):
    return tf.Variable(random.normal(0, deviation, shape).astype(np.float32))


def beside(other, value):
    with strategy.extended.colocate_vars_with(other):
        return tf.Variable(value, trainable=False)


class Perceptron:
    """784-256-128-10, Adam."""

    inputs = random.normal(0, 1, (BATCH, SIZES[0])).astype(np.float32)
    labels = random.integers(0, SIZES[-1], BATCH).astype(np.int32)

    def __init__(self):
        self.weights = [variable((n, m), (2 / n) ** 0.5) for n, m in zip(SIZES, SIZES[1:])]
        self.biases = [variable((m,), 0) for m in SIZES[1:]]
        self.variables = self.weights + self.biases
        self.moments = [[beside(v, tf.zeros(v.shape)) for _ in range(2)] for v in self.variables]
        # The powers of beta1 and beta2, once per ps.
        self.powers = {}
        for v in self.variables:
            if v.device not in self.powers:
                self.powers[v.device] = [beside(v, 0.9), beside(v, 0.999)]

    def logits(self, x):
        for layer, (w, b) in enumerate(zip(self.weights, self.biases)):
            x = tf.nn.bias_add(tf.matmul(tf.nn.relu(x) if layer else x, w), b)
        return x

    def apply(self, gradients):
        powers = {}
        for device, variables in self.powers.items():
            with tf.device(device):
                powers[device] = [v.read_value() for v in variables]
        for v, (m, n), gradient in zip(self.variables, self.moments, gradients):
            power1, power2 = powers[v.device]
            tf.raw_ops.ResourceApplyAdam(
                var=v.handle, m=m.handle, v=n.handle, beta1_power=power1, beta2_power=power2,
                lr=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient,
            )
        for device, variables in self.powers.items():
            with tf.device(device):
                for v, power, beta in zip(variables, powers[device], (0.9, 0.999)):
                    v.assign(power * beta, read_value=False)


class Embedding:
    """The mean of embeddings from a table split over the ps, then a dense layer; sparse Adagrad."""

    inputs = random.integers(0, ROWS, (BATCH, IDS))
    labels = random.integers(0, CLASSES, BATCH).astype(np.int32)

    def __init__(self):
        table = variable((ROWS, DIMENSIONS), 0.05)
        self.shards = list(getattr(table, "variables", [table]))
        self.weights, self.bias = variable((DIMENSIONS, CLASSES), 0.1), variable((CLASSES,), 0)
        self.variables = [*self.shards, self.weights, self.bias]
        self.sums = [beside(v, tf.fill(v.shape, 0.1)) for v in self.variables]

    def logits(self, ids):
        # Each row is fetched once, and its gradient has one entry.
        ids, places = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.gather(tf.nn.embedding_lookup(self.shards, ids), places)
        means = tf.reduce_mean(tf.reshape(rows, (BATCH, IDS, DIMENSIONS)), 1)
        return tf.nn.bias_add(tf.matmul(means, self.weights), self.bias)

    def apply(self, gradients):
        for v, total, gradient in zip(self.variables, self.sums, gradients):
            common = {"var": v.handle, "accum": total.handle, "lr": 0.05, "epsilon": 1e-7}
            if isinstance(gradient, tf.IndexedSlices):
                tf.raw_ops.ResourceSparseApplyAdagradV2(grad=gradient.values, indices=gradient.indices, **common)
            else:
                tf.raw_ops.ResourceApplyAdagradV2(grad=gradient, **common)


with strategy.scope():
    model = Embedding() if embedding else Perceptron()


@tf.function
def function():
    # A constant in the function, which each worker gets once, is the cheapest input.
    inputs, labels = tf.constant(model.inputs), tf.constant(model.labels)
    for _ in range(steps_per_function):
        with tf.GradientTape() as tape:
            # Also where there is one shard, a plain variable that lookup would not watch by itself.
            tape.watch(model.variables)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=model.logits(inputs))
            loss = tf.reduce_mean(losses)
        model.apply(tape.gradient(loss, model.variables))
    return loss


def train(functions):
    for _ in range(functions):
        loss = coordinator.schedule(function)
    coordinator.join()
    return loss


train(50)
steps = 0
started = time.perf_counter()
while (elapsed := time.perf_counter() - started) < seconds:
    last = train(100)
    steps += 100 * steps_per_function
print(
    json.dumps(
        {
            "steps": steps,
            "seconds": elapsed,
            "steps_per_s": steps / elapsed,
            "loss": float(coordinator.fetch(last)),
            "variables_bytes": sum(v.dtype.size * v.shape.num_elements() for v in model.variables),
        }
    ),
    flush=True,
)
# The coordinator's threads need not be waited for.
os._exit(0)
