//! Columns of Parquet files and record batches.

use ::parquet::arrow::ArrowWriter;
use ::parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use ::parquet::file::properties::WriterProperties;
use arrow_array::builder::{FixedSizeListBuilder, Int16Builder, ListBuilder};
use arrow_array::*;
use arrow_schema::{DataType, Field, Fields};

use super::*;
use crate::Array;

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

fn write_to(path: &Path, batch: &RecordBatch, compression: Compression) {
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn problem<T>(result: Result<T>) -> String {
    result.err().unwrap().to_string()
}

#[test]
fn columns_of_parquet_files_become_arrays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let column = |values: ArrayRef| values;
    let batch = RecordBatch::try_from_iter([
        ("x", column(Arc::new(Float32Array::from_iter_values((0..10).map(|x| x as f32))))),
        ("n", column(Arc::new(Int64Array::from_iter_values(10..20)))),
        ("gap", column(Arc::new(Int64Array::from(vec![None; 10])))),
        ("name", column(Arc::new(StringArray::from(vec!["a"; 10])))),
    ])
    .unwrap();
    let mut writer =
        ::parquet::arrow::ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let rows = |part, parts| -> Vec<f32> {
        let batches = Parquet::new().batch_size(3).columns(["x", "n"]).open(&FileShard::part(&path, part, parts));
        let arrays = batches.unwrap().map(|batch| columns(&batch.unwrap(), &["n", "x"]).unwrap());
        arrays.flat_map(|array| array.as_slice().to_vec()).collect()
    };
    let whole = rows(0, 1);
    assert_eq!((whole.len(), &whole[..4]), (20, &[10.0, 0.0, 11.0, 1.0][..]));
    assert_eq!([rows(0, 3), rows(1, 3), rows(2, 3)].concat(), whole);
    for (name, words) in [("name", "numbers are wanted"), ("gap", "missing values"), ("z", "not there")] {
        let text = columns(&batch, &[name]).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
    let missing = Dataset::from_files([&path]).read(Parquet::new().columns(["z"]), ReadOptions::default());
    assert!(all(&missing).unwrap_err().to_string().contains("no column \"z\""));
    let arrow = folder.path().join("rows.arrow");
    let mut writer =
        arrow_ipc::writer::FileWriter::try_new(fs::File::create(&arrow).unwrap(), &batch.schema()).unwrap();
    for start in [0, 4, 6] {
        writer.write(&batch.slice(start, if start == 4 { 2 } else { 4 })).unwrap();
    }
    writer.finish().unwrap();
    let (whole_batches, parts) = whole_and_parts(&arrow, Arrow);
    let counts = |batches: &[RecordBatch]| batches.iter().map(RecordBatch::num_rows).collect::<Vec<_>>();
    assert_eq!(counts(&whole_batches), [4, 2, 4]);
    assert_eq!(parts.iter().map(|part| counts(part)).collect::<Vec<_>>(), [[4], [2], [4]]);
    assert_eq!(columns(&whole_batches[2], &["n"]).unwrap().as_slice(), [16.0, 17.0, 18.0, 19.0]);
    fs::write(&path, b"PAR1").unwrap();
    let broken = Dataset::from_files([&path]).read(Parquet::new(), ReadOptions::default());
    assert!(all(&broken).unwrap_err().to_string().contains("rows.parquet"));
}

#[test]
fn columns_in_every_compression_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let rows = batch(vec![("n", Arc::new(Int64Array::from_iter_values((0..5000).map(|n| n % 7))))]);
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
    ] {
        write_to(&path, &rows, compression);
        let read = all(&Dataset::from_files([&path]).read(Parquet::new().batch_size(5000), ReadOptions::default()));
        assert_eq!(read.unwrap(), std::slice::from_ref(&rows), "{compression}");
    }
}

#[test]
fn numbers_of_every_type_become_floats() {
    let half = |values: [f32; 3]| Float16Array::from(values.map(::half::f16::from_f32).to_vec());
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("i8", Arc::new(Int8Array::from(vec![1, 0, 3]))),
        ("i16", Arc::new(Int16Array::from(vec![1, 0, 3]))),
        ("i32", Arc::new(Int32Array::from(vec![1, 0, 3]))),
        ("i64", Arc::new(Int64Array::from(vec![1, 0, 3]))),
        ("u8", Arc::new(UInt8Array::from(vec![1, 0, 3]))),
        ("u16", Arc::new(UInt16Array::from(vec![1, 0, 3]))),
        ("u32", Arc::new(UInt32Array::from(vec![1, 0, 3]))),
        ("u64", Arc::new(UInt64Array::from(vec![1, 0, 3]))),
        ("f16", Arc::new(half([1.0, 0.0, 3.0]))),
        ("f32", Arc::new(Float32Array::from(vec![1.0, 0.0, 3.0]))),
        ("f64", Arc::new(Float64Array::from(vec![1.0, 0.0, 3.0]))),
        ("decimal", Arc::new(Decimal128Array::from(vec![100, 0, 300]).with_precision_and_scale(9, 2).unwrap())),
        ("dictionary", {
            let values = Arc::new(Int64Array::from(vec![3, 1, 0]));
            Arc::new(DictionaryArray::<types::Int8Type>::new(vec![1, 2, 0].into(), values))
        }),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let rows = batch(columns);
    write_to(&path, &rows, Compression::UNCOMPRESSED);
    let read = all(&Dataset::from_files([&path]).read(Parquet::new(), ReadOptions::default())).unwrap();
    for name in rows.schema().fields().iter().map(|field| field.name().as_str()) {
        assert_eq!(columns_of(&read[0], name), [1.0, 0.0, 3.0], "{name}");
        assert_eq!(column::<f64>(&read[0], name).unwrap().as_slice(), [1.0, 0.0, 3.0], "{name}");
    }
    let flags = batch(vec![("flag", Arc::new(BooleanArray::from(vec![true, false])))]);
    assert_eq!(columns_of(&flags, "flag"), [1.0, 0.0]);
    assert_eq!(column::<bool>(&flags, "flag").unwrap().as_slice(), [true, false]);
    assert_eq!(column::<u8>(&flags, "flag").unwrap().as_slice(), [1, 0]);
}

fn columns_of(batch: &RecordBatch, name: &str) -> Vec<f32> {
    columns(batch, &[name]).unwrap().as_slice().to_vec()
}

#[test]
fn typed_columns_keep_their_values_or_say_which_they_cannot() {
    let rows = batch(vec![
        ("id", Arc::new(Int64Array::from(vec![3, (1 << 24) + 1, i64::MAX]))),
        ("large", Arc::new(UInt64Array::from(vec![1, 2, u64::MAX]))),
        ("x", Arc::new(Float64Array::from(vec![0.1, f64::NAN, 1e300]))),
        ("name", Arc::new(StringArray::from(vec!["a", "", "c"]))),
        ("bytes", Arc::new(BinaryArray::from(vec![&b"\xff"[..], b"", b"c"]))),
        ("price", Arc::new(Decimal128Array::from(vec![1, 2, 3]).with_precision_and_scale(9, 0).unwrap())),
    ]);
    assert_eq!(column::<i64>(&rows, "id").unwrap().as_slice(), [3, (1 << 24) + 1, i64::MAX]);
    assert_eq!(column::<u64>(&rows, "large").unwrap().as_slice(), [1, 2, u64::MAX]);
    assert_eq!(column::<i32>(&rows, "price").unwrap().as_slice(), [1, 2, 3]);
    assert_eq!(column::<String>(&rows, "name").unwrap().as_slice(), ["a", "", "c"]);
    assert_eq!(column::<Vec<u8>>(&rows, "name").unwrap().as_slice(), [&b"a"[..], b"", b"c"]);
    assert_eq!(column::<Vec<u8>>(&rows, "bytes").unwrap().as_slice(), [&b"\xff"[..], b"", b"c"]);
    let text = problem(column::<f32>(&rows, "id"));
    assert_eq!(text, "column \"id\": row 1 has 16777217, which f32 does not hold; ask for a wider type");
    assert!(problem(column::<f64>(&rows, "id")).contains("row 2 has 9223372036854775807, which f64 does not hold"));
    assert!(problem(column::<i64>(&rows, "large")).contains("row 2 has 18446744073709551615, which i64"));
    assert!(problem(column::<f32>(&rows, "x")).contains("row 2 has 1e300, which f32 does not hold"));
    assert!(column::<f64>(&rows, "x").unwrap().as_slice()[1].is_nan());
    assert!(problem(column::<i64>(&rows, "x")).contains("it holds Float64, and i64 are wanted"));
    assert!(problem(column::<String>(&rows, "bytes")).contains("it holds Binary, and String are wanted"));
    // The floats of `columns` are the nearest, as before, and there is none near a number beyond their range.
    assert_eq!(columns_of(&rows, "id")[1], 16_777_216.0);
    let beyond = "column \"x\": row 2 has 1e300, which f32 does not hold; ask for a wider type";
    assert_eq!(problem(columns(&rows, &["x"])), beyond);
    assert_eq!(problem(columns_or(&rows, &["x"], 0.0)), beyond);
    let infinite = batch(vec![("x", Arc::new(Float64Array::from(vec![f64::NEG_INFINITY, 3e38])))]);
    assert_eq!(columns_of(&infinite, "x"), [f32::NEG_INFINITY, 3e38]);
}

#[test]
fn fields_of_structs_have_names_with_a_dot() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let fields = Fields::from(vec![
        Field::new("x", DataType::Int64, true),
        Field::new("name", DataType::Utf8, true),
        Field::new("size.of", DataType::Int64, true),
    ]);
    let inner: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(vec![Some(1), None, Some(3), Some(4)])),
        Arc::new(StringArray::from(vec!["a", "b", "c", "d"])),
        Arc::new(Int64Array::from(vec![5, 6, 7, 8])),
    ];
    let point = StructArray::new(fields, inner, Some(vec![true, true, false, true].into()));
    let rows = batch(vec![
        ("point", Arc::new(point)),
        ("other", Arc::new(Int64Array::from(vec![1, 2, 3, 4]))),
        ("with.dot", Arc::new(Int64Array::from(vec![1, 2, 3, 4]))),
    ]);
    write_to(&path, &rows, Compression::UNCOMPRESSED);
    let read = |names: &[&str]| -> Result<RecordBatch> {
        let reader = Parquet::new().columns(names.iter().copied());
        Ok(all(&Dataset::from_files([&path]).read(reader, ReadOptions::default()))?.remove(0))
    };
    let whole = read(&["point"]).unwrap();
    assert_eq!(whole.column(0), rows.column(0));
    let part = read(&["point.x", "with.dot"]).unwrap();
    assert_eq!(part.num_columns(), 2);
    assert_eq!(part.column_by_name("point").unwrap().data_type().to_string().matches("name").count(), 0);
    assert_eq!(columns_of(&part, "with.dot"), [1.0, 2.0, 3.0, 4.0]);
    // The struct of row 2 is missing, and the field of row 1.
    assert_eq!(columns_or(&part, &["point.x"], -1.0).unwrap().as_slice(), [1.0, -1.0, -1.0, 4.0]);
    assert_eq!(column_or(&whole, "point.size.of", 0_i64).unwrap().as_slice(), [5, 6, 0, 8]);
    assert!(problem(columns(&part, &["point.x"])).contains("\"point.x\": it has missing values"));
    assert_eq!(without_nulls(&whole, &["point.name"]).unwrap().num_rows(), 3);
    let kept = without_nulls(&rows, &["point.x", "other"]).unwrap();
    assert_eq!(column::<i64>(&kept, "other").unwrap().as_slice(), [1, 4]);
    assert_eq!(column::<String>(&kept, "point.name").unwrap().as_slice(), ["a", "d"]);
    assert!(
        problem(columns(&rows, &["point"])).contains("it holds structs; name one of their fields after a dot: x, ")
    );
    for missing in ["point.z", "other.x", "point.", ""] {
        assert!(problem(column::<i64>(&rows, missing)).contains("it is not there; name one that is, of point, other"));
        assert!(problem(read(&[missing])).contains(&format!("it has no column {missing:?}")), "{missing}");
    }
}

#[test]
fn lists_of_equal_length_become_a_dimension() {
    let mut fixed = FixedSizeListBuilder::new(Int16Builder::new(), 2);
    let mut lists = ListBuilder::new(ListBuilder::new(Int16Builder::new()));
    let mut ragged = ListBuilder::new(Int16Builder::new());
    for row in 0..4 {
        fixed.values().append_slice(&[row, 10 * row]);
        fixed.append(row != 1);
        for _ in 0..2 {
            lists.values().values().append_slice(&[row, 2, 3]);
            lists.values().append(true);
        }
        lists.append(true);
        ragged.values().append_slice(&[row, row, row][..1 + row as usize % 2]);
        ragged.append(true);
    }
    let rows = batch(vec![
        ("fixed", Arc::new(fixed.finish())),
        ("lists", Arc::new(lists.finish())),
        ("ragged", Arc::new(ragged.finish())),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    write_to(&path, &rows, Compression::UNCOMPRESSED);
    let read = all(&Dataset::from_files([&path]).read(Parquet::new(), ReadOptions::default())).unwrap().remove(0);
    for rows in [rows, read] {
        assert!(problem(column::<i16>(&rows, "fixed")).contains("missing values"));
        assert_eq!(
            column_or(&rows, "fixed", -1_i16).unwrap(),
            Array::new([4, 2], vec![0, 0, -1, -1, 2, 20, 3, 30]).unwrap()
        );
        let kept = without_nulls(&rows, &["fixed"]).unwrap();
        assert_eq!(column::<f32>(&kept, "fixed").unwrap().as_slice(), [0.0, 0.0, 2.0, 20.0, 3.0, 30.0]);
        let lists = column::<i64>(&rows.slice(1, 2), "lists").unwrap();
        assert_eq!(lists, Array::new([2, 2, 3], vec![1, 2, 3, 1, 2, 3, 2, 2, 3, 2, 2, 3]).unwrap());
        let text = problem(column::<i64>(&rows, "ragged"));
        assert!(text.contains("that of row 0 has 1 items, that of row 1 2"), "{text}");
        let words = ragged_column::<i64>(&rows.slice(1, 3), "ragged").unwrap();
        assert_eq!((words.values().as_slice(), words.row_splits()), (&[1, 1, 2, 3, 3][..], &[0, 2, 3, 5][..]));
        assert_eq!(ragged_column::<i64>(&kept, "fixed").unwrap().row_lengths(), [2, 2, 2]);
        let nested = ragged_column::<i16>(&rows, "lists").unwrap();
        assert_eq!((nested.values().shape(), nested.row_splits()), (&[8, 3][..], &[0, 2, 4, 6, 8][..]));
        assert!(problem(ragged_column::<i64>(&rows, "fixed")).contains("missing values"));
        assert!(problem(columns(&rows, &["lists"])).contains("its rows have shape [2, 3], and numbers are wanted"));
        assert_eq!(column::<i64>(&rows.slice(0, 0), "ragged").unwrap().shape(), [0, 0]);
    }
}

#[test]
fn missing_values_are_found_inside_of_dictionaries_and_lists() {
    let values = Arc::new(StringArray::from(vec![Some("a"), None]));
    let keys = Int8Array::from(vec![Some(0), None, Some(1), Some(0)]);
    let mut lists = ListBuilder::new(Int16Builder::new());
    for row in 0..4 {
        lists.values().append_option(Some(row).filter(|row| *row != 3));
        lists.append(true);
    }
    let empty = DictionaryArray::<types::Int8Type>::new(
        Int8Array::from(vec![None; 4]),
        Arc::new(Int64Array::from(Vec::<i64>::new())),
    );
    let rows = batch(vec![
        ("name", Arc::new(DictionaryArray::new(keys, values))),
        ("lists", Arc::new(lists.finish())),
        ("nothing", Arc::new(NullArray::new(4))),
        ("empty", Arc::new(empty)),
        ("n", Arc::new(Int64Array::from(vec![0, 1, 2, 3]))),
    ]);
    let kept = |names: &[&str]| column::<i64>(&without_nulls(&rows, names).unwrap(), "n").unwrap().as_slice().to_vec();
    assert!(problem(ragged_column::<i64>(&rows, "lists")).contains("missing values"));
    assert!(problem(ragged_column::<i64>(&rows, "n")).contains("it holds Int64, and lists are wanted"));
    assert_eq!(kept(&["name"]), [0, 3]);
    assert_eq!(kept(&["lists"]), [0, 1, 2]);
    assert_eq!(kept(&["name", "lists"]), [0]);
    assert_eq!(kept(&["n"]), [0, 1, 2, 3]);
    assert_eq!((kept(&["nothing"]).len(), kept(&["empty"]).len()), (0, 0));
    assert_eq!(column_or(&rows, "name", "?".to_owned()).unwrap().as_slice(), ["a", "?", "?", "a"]);
    assert_eq!(column_or(&rows, "nothing", 7_i64).unwrap().as_slice(), [7; 4]);
    assert_eq!(column_or(&rows, "empty", 7_i64).unwrap().as_slice(), [7; 4]);
    assert!(problem(column::<String>(&rows, "name")).contains("missing values"));
    assert!(problem(without_nulls(&rows, &["z"])).contains("not there"));
}
