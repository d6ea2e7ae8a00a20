"""All-reduce by TensorFlow's collectives between processes, one JSON line per size; started by `cargo xtask bench`.

Usage: RANK=r WORLD_SIZE=n TF_CONFIG=... tf_ring.py REPETITIONS BYTES...
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

repetitions = int(sys.argv[1])
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

for size in map(int, sys.argv[2:]):
    values = tf.constant(np.zeros(size // 4, np.float32))

    @tf.function
    def step():
        def replica():
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)

        return strategy.run(replica)

    for _ in range(3):
        step()
    started = time.perf_counter()
    step()
    count = repetitions or max(5, min(2000, int(0.25 / max(time.perf_counter() - started, 1e-7))))
    # All ranks must repeat equally often.
    count = int(strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(float(count)), axis=None) / strategy.num_replicas_in_sync)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] == "0":
        print(json.dumps({"bytes": size, "time_us": float(np.median(seconds)) * 1e6}), flush=True)
