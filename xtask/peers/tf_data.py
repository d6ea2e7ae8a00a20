"""Pipelines of tf.data over the files of `cargo xtask bench input`, one JSON line for each.

Usage: tf_data.py FOLDER
"""

import glob
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
BATCH, BUFFER, FLOATS, COLUMNS = 64, 10_000, 128, 16
PARALLEL = AUTOTUNE


def files(suffix):
    return sorted(glob.glob(os.path.join(sys.argv[1], "*" + suffix)))


def records():
    data = tf.data.TFRecordDataset(files(".tfrecord"), num_parallel_reads=PARALLEL)
    return sum(batch.shape[0] for batch in data.batch(1024).prefetch(AUTOTUNE))


def lines():
    data = tf.data.TextLineDataset(files(".csv"), num_parallel_reads=PARALLEL)
    # Less the header of each file.
    return sum(batch.shape[0] for batch in data.batch(1024).prefetch(AUTOTUNE)) - len(files(".csv"))


def examples():
    spec = {"x": tf.io.FixedLenFeature([FLOATS], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}
    data = tf.data.TFRecordDataset(files(".tfrecord"), num_parallel_reads=PARALLEL)
    data = data.shuffle(BUFFER, seed=42).batch(BATCH)
    data = data.map(lambda batch: tf.io.parse_example(batch, spec), num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)
    return sum(batch["label"].shape[0] for batch in data)


def rows():
    data = tf.data.experimental.CsvDataset(files(".csv"), [tf.float32] * COLUMNS, header=True)
    data = data.shuffle(BUFFER, seed=42).batch(BATCH)
    data = data.map(lambda *columns: tf.stack(columns, 1), num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)
    return sum(batch.shape[0] for batch in data)


def fastest(pipeline):
    """The pipeline with and without parallel reads, which do not always pay."""
    global PARALLEL
    best = None
    for PARALLEL in (AUTOTUNE, None):
        pipeline()
        started = time.perf_counter()
        count = pipeline()
        seconds = time.perf_counter() - started
        best = min(best or (seconds, count), (seconds, count))
    return best


for name, pipeline in [("tfrecord", records), ("example", examples), ("text", lines), ("csv", rows)]:
    seconds, count = fastest(pipeline)
    print(json.dumps({"case": name, "seconds": seconds, "records": count}), flush=True)
