//! Files of every format: whole, in parts, and damaged.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::Array;

mod columns;
mod packed;
mod samples;

fn all<T: Send + 'static>(data: &Dataset<T>) -> Result<Vec<T>> {
    data.iter().collect()
}

/// Reads a file whole and in three parts, and checks that the parts have as many records together.
fn whole_and_parts<R: RecordReader + Clone>(path: &Path, reader: R) -> (Vec<R::Record>, Vec<Vec<R::Record>>) {
    let read = |part, parts| -> Vec<R::Record> {
        let file = FileShard::part(path, part, parts);
        reader.open(&file).unwrap().map(|record| record.unwrap()).collect()
    };
    (read(0, 1), (0..3).map(|part| read(part, 3)).collect())
}

fn skipping() -> (Skipped, ReadOptions) {
    let skipped = Skipped::default();
    (skipped.clone(), ReadOptions { bad_records: BadRecords::Skip(skipped), ..ReadOptions::default() })
}

fn records(folder: &Path, count: usize) -> PathBuf {
    let path = folder.join("data.tfrecord");
    let mut writer = TfRecordWriter::new(fs::File::create(&path).unwrap());
    (0..count).for_each(|record| writer.write(format!("record {record}").as_bytes()).unwrap());
    writer.finish().unwrap();
    path
}

#[test]
fn parts_of_a_file_have_its_records_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines.txt");
    fs::write(&path, "a\r\nb\n\nd\ne").unwrap();
    let (whole, parts) = whole_and_parts(&path, Lines);
    assert_eq!(whole, ["a", "b", "", "d", "e"]);
    assert_eq!(parts, [vec!["a", "d"], vec!["b", "e"], vec![""]]);

    let (whole, parts) = whole_and_parts(&records(folder.path(), 4), TfRecords);
    assert_eq!(whole[3], b"record 3");
    assert_eq!(parts, [vec![whole[0].clone(), whole[3].clone()], vec![whole[1].clone()], vec![whole[2].clone()]]);

    let path = folder.path().join("rows.csv");
    fs::write(&path, "x,y\n1,2\n3,4\n5,6\n").unwrap();
    let (whole, parts) = whole_and_parts(&path, Csv::<(i32, i32)>::new());
    assert_eq!(whole, [(1, 2), (3, 4), (5, 6)]);
    assert_eq!(parts, [[(1, 2)], [(3, 4)], [(5, 6)]]);
}

#[test]
fn every_part_of_a_table_learns_that_it_cannot_be_read_further() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv.gz");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let rows: String = (0..20_000u64).map(|row| format!("{row},{}\n", row.wrapping_mul(0x9e37_79b9_7f4a))).collect();
    std::io::Write::write_all(&mut gzip, rows.as_bytes()).unwrap();
    let whole = gzip.finish().unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    for part in 0..5 {
        let file = FileShard::part(&path, part, 5);
        let read: Vec<_> = Csv::<(u64, u64)>::new().has_headers(false).open(&file).unwrap().collect();
        let failed = read.iter().filter(|record| record.is_err()).count();
        assert!(failed == 1 && read.len() > 1000, "part {part}: {failed} of {} records", read.len());
    }
}

#[test]
fn a_truncated_record_file_is_named_with_record_and_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = records(folder.path(), 3);
    let bytes = fs::read(&path).unwrap();
    // Each record takes 8 + 4 + 8 + 4 bytes.
    for (length, place, words) in [
        (70, "record 2 at byte 48", "10 of the 12 bytes"),
        (55, "record 2 at byte 48", "7 of the 12 bytes of a header"),
    ] {
        fs::write(&path, &bytes[..length]).unwrap();
        let data = Dataset::from_files([&path]).read(TfRecords, ReadOptions::default());
        let text = all(&data).unwrap_err().to_string();
        assert!(text.contains("data.tfrecord, ") && text.contains(place) && text.contains(words), "{text}");
        let (skipped, options) = skipping();
        let data = Dataset::from_files([&path]).read(TfRecords, options);
        assert_eq!((all(&data).unwrap().len(), skipped.count()), (2, 1));
    }
}

#[test]
fn lengths_that_no_file_can_have_are_sentences() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.tfrecord");
    let masked = |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let kept = records(folder.path(), 1);
    let first = fs::read(kept).unwrap();
    for length in [u64::MAX, u64::MAX - 3, u64::MAX - 4, u64::MAX - 16, i64::MAX as u64, i64::MAX as u64 - 15] {
        let header = length.to_le_bytes();
        fs::write(&path, [&first[..], &header, &masked(&header), b"rest"].concat()).unwrap();
        let data = Dataset::from_files([&path]).read(TfRecords, ReadOptions::default());
        let text = all(&data).unwrap_err().to_string();
        let words = format!("record 1 at byte 24: a record of {length} bytes was promised, more than a file can have");
        assert!(text.ends_with(&words), "{text}");
        // Skipped as the record of another part.
        let file = FileShard::part(&path, 0, 2);
        let read: Vec<_> = TfRecords.open(&file).unwrap().collect();
        assert!(read.len() == 2 && read[0].is_ok() && read[1].is_err(), "{read:?}");
    }
    // A length that is valid, but larger than this file, allocates only what is there.
    let header = (i64::MAX as u64 - 1000).to_le_bytes();
    fs::write(&path, [&header[..], &masked(&header), b"rest"].concat()).unwrap();
    let text = all(&Dataset::from_files([&path]).read(TfRecords, ReadOptions::default())).unwrap_err().to_string();
    assert!(text.contains("record 0 at byte 0: the file is truncated: 4 of the"), "{text}");
}

#[test]
fn columns_and_batches_that_are_said_to_lie_outside_of_the_file_are_sentences() {
    use ::parquet::file::metadata::ParquetMetaDataWriter;
    use ::parquet::file::reader::{FileReader as _, SerializedFileReader};
    use arrow_array::{ArrayRef, Int64Array, RecordBatch};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let batch = RecordBatch::try_from_iter([("n", Arc::new(Int64Array::from_iter_values(0..10)) as ArrayRef)]).unwrap();
    let mut writer =
        ::parquet::arrow::ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let bytes = fs::read(&path).unwrap();
    let metadata = SerializedFileReader::new(fs::File::open(&path).unwrap()).unwrap().metadata().clone();
    for compressed in [i64::MAX, -1, 1 << 40] {
        let group = metadata.row_group(0).clone();
        let column = group.column(0).clone().into_builder().set_total_compressed_size(compressed).build().unwrap();
        let group = group.into_builder().set_column_metadata(vec![column]).build().unwrap();
        let wrong = metadata.clone().into_builder().set_row_groups(vec![group]).build();
        let mut file = bytes.clone();
        ParquetMetaDataWriter::new(&mut file, &wrong).finish().unwrap();
        fs::write(&path, file).unwrap();
        let data = Dataset::from_files([&path]).read(Parquet::new(), ReadOptions::default());
        let text = all(&data).unwrap_err().to_string();
        assert!(
            text.contains(&format!("rows.parquet: it says that a column has {compressed} bytes at byte")),
            "{text}"
        );
    }

    let path = folder.path().join("rows.arrow");
    let mut writer = arrow_ipc::writer::FileWriter::try_new(fs::File::create(&path).unwrap(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let bytes = fs::read(&path).unwrap();
    let tail: [u8; 10] = bytes[bytes.len() - 10..].try_into().unwrap();
    let footer_at = bytes.len() - 10 - arrow_ipc::reader::read_footer_length(tail).unwrap();
    let block =
        *arrow_ipc::root_as_footer(&bytes[footer_at..bytes.len() - 10]).unwrap().recordBatches().unwrap().get(0);
    // A block consists of its offset, the length of its header, four bytes of padding, and the length of its body.
    let known = [&block.offset().to_le_bytes()[..], &block.metaDataLength().to_le_bytes()].concat();
    let at = footer_at + bytes[footer_at..].windows(known.len()).position(|window| window == known).unwrap();
    let patched = |from: usize, field: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at + from..at + from + field.len()].copy_from_slice(field);
        fs::write(&path, bytes).unwrap();
        all(&Dataset::from_files([&path]).read(Arrow, ReadOptions::default())).unwrap_err().to_string()
    };
    for (text, words) in [
        (patched(16, &(-1_i64).to_le_bytes()), "it says that a batch has -1 bytes at byte"),
        (patched(16, &i64::MAX.to_le_bytes()), "it says that a batch has 9223372036854775807 bytes at byte"),
        (patched(8, &(-8_i32).to_le_bytes()), "it says that the header of a batch has -8 bytes at byte"),
        (patched(8, &0_i32.to_le_bytes()), "the header of a batch has 0 bytes, but the shortest has 8"),
        (patched(0, &(1_i64 << 50).to_le_bytes()), "it says that the header of a batch has"),
    ] {
        assert!(text.contains(words) && text.contains("rows.arrow"), "{text}");
    }
    fs::write(&path, [&i32::MAX.to_le_bytes()[..], b"ARROW1"].concat()).unwrap();
    let text = all(&Dataset::from_files([&path]).read(Arrow, ReadOptions::default())).unwrap_err().to_string();
    assert!(text.contains("its footer has 2147483647 bytes, but the file has 10 bytes"), "{text}");
}

#[test]
fn a_wrong_checksum_loses_one_record_or_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = records(folder.path(), 3);
    let bytes = fs::read(&path).unwrap();
    for (flipped, left, words) in [(24 + 14, 2, "checksum of the data"), (24 + 2, 1, "checksum of the length")] {
        let mut bytes = bytes.clone();
        bytes[flipped] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let data = Dataset::from_files([&path]).read(TfRecords, ReadOptions::default());
        let text = all(&data).unwrap_err().to_string();
        assert!(text.contains("record 1 at byte 24") && text.contains(words), "{text}");
        let (skipped, options) = skipping();
        assert_eq!(all(&Dataset::from_files([&path]).read(TfRecords, options)).unwrap().len(), left);
        assert!(skipped.count() == 1 && skipped.first()[0].contains(words));
    }
}

#[test]
fn a_row_with_too_few_fields_is_named_or_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    fs::write(&path, "x,y\n1,2\n3\n5,six\n7,8\n").unwrap();
    let data = Dataset::from_files([&path]).read(Csv::<(i32, i32)>::new(), ReadOptions::default());
    let text = all(&data).unwrap_err().to_string();
    assert!(text.contains("rows.csv, record 1 at byte 8") && text.contains("fields"), "{text}");
    let (skipped, options) = skipping();
    let data = Dataset::from_files([&path]).read(Csv::<(i32, i32)>::new(), options);
    assert_eq!(all(&data).unwrap(), [(1, 2), (7, 8)]);
    assert_eq!(skipped.count(), 2);
    assert!(skipped.first()[1].contains("record 2 at byte 10"), "{:?}", skipped.first());
}

#[test]
fn a_quote_that_is_not_closed_is_named_in_every_part() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    let rows: String = (0..5000).map(|row| format!("{row},\"{row}\"\n")).collect();
    for (ahead, rest, quote) in [("", "5000,\"5000\n5001,5001\n", 5), ("", "5000,5000\n\"5001", 10), (&rows, "1,\"", 2)]
    {
        let text = format!("x,y\n{ahead}{rest}");
        fs::write(&path, &text).unwrap();
        let expected = format!("the quote at byte {} is not closed", text.len() - rest.len() + quote);
        for part in 0..3 {
            let file = FileShard::part(&path, part, 3);
            let mut read: Vec<_> = Csv::<(String, String)>::new().open(&file).unwrap().collect();
            let bad = read.pop().unwrap().unwrap_err();
            assert!(bad.problem.contains(&expected), "{}", bad.problem);
            assert!(read.iter().all(Result::is_ok));
        }
        let data = Csv::<(String, String)>::new().quoting(false);
        assert!(
            all(&Dataset::from_files([&path]).read(data, ReadOptions::default())).is_ok() != rest.ends_with("5001")
        );
    }
    fs::write(&path, "x,\"y\n1,2\n").unwrap();
    let data = Dataset::from_files([&path]).read(Csv::<(i32, i32)>::new(), ReadOptions::default());
    let text = all(&data).unwrap_err().to_string();
    assert!(text.contains("rows.csv: the quote at byte 2 is not closed"), "{text}");
    // A quote that only the end of the file follows is closed.
    fs::write(&path, "x,y\n\"1\",\"2\"").unwrap();
    assert_eq!(all(&data).unwrap(), [(1, 2)]);
}

#[test]
fn an_unreadable_file_among_many_is_named_or_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a", "missing", "b"].map(|name| folder.path().join(name));
    fs::write(&paths[0], "1\n").unwrap();
    fs::write(&paths[2], "2\n").unwrap();
    let text = all(&Dataset::from_files(&paths).read(Lines, ReadOptions::default())).unwrap_err().to_string();
    assert!(text.contains("missing: No such file"), "{text}");
    let (skipped, options) = skipping();
    assert_eq!(all(&Dataset::from_files(&paths).read(Lines, options)).unwrap(), ["1", "2"]);
    assert_eq!(skipped.count(), 1);
    // Bytes that are not valid UTF-8.
    fs::write(&paths[1], b"ok\n\xff\nok\n").unwrap();
    let (skipped, options) = skipping();
    assert_eq!(all(&Dataset::from_files(&paths).read(Lines, options)).unwrap().len(), 4);
    assert!(skipped.first()[0].contains("missing, record 1 at byte 3"), "{:?}", skipped.first());
}

#[test]
fn examples_are_read_and_those_that_are_none_named() {
    let example = Example::from([("x", Feature::Float(vec![1.0, 2.0])), ("name", Feature::Bytes(vec![b"a".to_vec()]))]);
    let read = Example::decode(&example.encode()).unwrap();
    assert_eq!(read, example);
    let text = read.int64s("x").unwrap_err().to_string();
    assert!(text.contains("integers were asked for, but \"x\" holds floats"), "{text}");
    let text = read.floats("y").unwrap_err().to_string();
    assert!(text.contains("\"y\"") && text.contains("name, x"), "{text}");
    assert!(Example::decode(b"\xff\xff\xff").is_err());
}

#[test]
fn pictures_have_one_size_and_their_folders_class() {
    let folder = tempfile::tempdir().unwrap();
    for (class, shade) in [("rose", 200u8), ("daisy", 100)] {
        fs::create_dir(folder.path().join(class)).unwrap();
        let image = ::image::RgbImage::from_pixel(5, 4, ::image::Rgb([shade, 0, 0]));
        image.save(folder.path().join(class).join("1.png")).unwrap();
    }
    fs::write(folder.path().join("rose/broken.jpg"), b"no picture").unwrap();
    // Links to nothing that are neither pictures nor classes.
    #[cfg(unix)]
    for link in ["notes.txt", "rose/notes.txt", "rose/README"] {
        std::os::unix::fs::symlink("/nowhere/at/all", folder.path().join(link)).unwrap();
    }
    let images = ImageFolder::open(folder.path()).unwrap();
    assert_eq!(images.classes(), ["daisy", "rose"]);
    let (skipped, options) = skipping();
    let data = images.dataset().read(images.images([2, 3]), options).batch(4);
    let (pixels, labels) = data.iter().next().unwrap().unwrap();
    assert_eq!((pixels.shape(), pixels.as_slice()[0], labels.as_slice()), (&[2, 2, 3, 3][..], 100, &[0, 1][..]));
    assert!(skipped.count() == 1 && skipped.first()[0].contains("broken.jpg"), "{:?}", skipped.first());
    assert!(ImageFolder::open(folder.path().join("rose")).is_err());
}

#[test]
fn whole_arrays_are_read_and_damaged_ones_named() {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("digits.idx");
    let idx = [&[0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3][..], &[1, 2, 3, 4, 5, 6]].concat();
    fs::write(&path, &idx).unwrap();
    assert_eq!(read_idx(&path).unwrap(), Array::new([2, 3], vec![1, 2, 3, 4, 5, 6]).unwrap());
    let packed = folder.path().join("digits.idx.gz");
    let mut encoder = flate2::write::GzEncoder::new(fs::File::create(&packed).unwrap(), flate2::Compression::fast());
    encoder.write_all(&idx).unwrap();
    encoder.finish().unwrap();
    assert_eq!(read_idx(&packed).unwrap().shape(), [2, 3]);
    for (bytes, words) in [(&idx[..17], "[2, 3], and 5 elements"), (&idx[..7], "truncated"), (b"PNG", "does not begin")]
    {
        fs::write(&path, bytes).unwrap();
        let text = read_idx(&path).unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("digits.idx"), "{text}");
    }
    let path = folder.path().join("a.safetensors");
    let bytes: Vec<u8> = [1.5f32, 2.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = ::safetensors::tensor::TensorView::new(::safetensors::Dtype::F32, vec![2], &bytes).unwrap();
    fs::write(&path, ::safetensors::serialize([("x", view)], None).unwrap()).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.array::<f32>("x").unwrap().as_slice(), [1.5, 2.5]);
    assert!(file.array::<i64>("x").unwrap_err().to_string().contains("F32, and I64 was asked for"));
    assert!(file.array::<f32>("y").unwrap_err().to_string().contains("no array \"y\", but x"));
    fs::write(&path, b"nothing").unwrap();
    assert!(SafetensorsFile::open(&path).is_err());
}

#[test]
fn arrays_of_every_type_of_safetensors_are_read() {
    use ::safetensors::{Dtype, tensor::TensorView};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let views = [
        ("f16", Dtype::F16, vec![0x00, 0x3c, 0x00, 0xc0]),
        ("bf16", Dtype::BF16, vec![0x80, 0x3f, 0x00, 0xc0]),
        ("bool", Dtype::BOOL, vec![1, 0]),
        ("i16", Dtype::I16, vec![1, 0, 0xfe, 0xff]),
        ("u16", Dtype::U16, vec![1, 0, 0xfe, 0xff]),
    ];
    let views = views.iter().map(|(name, dtype, bytes)| (*name, TensorView::new(*dtype, vec![2], bytes).unwrap()));
    fs::write(&path, ::safetensors::serialize(views, None).unwrap()).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let halves = file.array::<half::f16>("f16").unwrap();
    assert_eq!(halves.as_slice().iter().map(|x| x.to_f32()).collect::<Vec<_>>(), [1.0, -2.0]);
    let halves = file.array::<half::bf16>("bf16").unwrap();
    assert_eq!(halves.as_slice().iter().map(|x| x.to_f32()).collect::<Vec<_>>(), [1.0, -2.0]);
    assert_eq!(file.array::<bool>("bool").unwrap().as_slice(), [true, false]);
    assert_eq!(file.array::<i16>("i16").unwrap().as_slice(), [1, -2]);
    assert_eq!(file.array::<u16>("u16").unwrap().as_slice(), [1, 0xfffe]);
    assert!(file.array::<i16>("u16").unwrap_err().to_string().contains("U16, and I16 was asked for"));
}

/// The system refuses to read the first bytes of a process's memory (EIO), as a broken disk would those of a file.
#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fails_is_not_a_damaged_record() {
    let (skipped, options) = skipping();
    let lines = Dataset::from_files(["/proc/self/mem"]).read(Lines, options.clone());
    assert!(matches!(all(&lines), Err(Error::File { .. })), "{:?}", all(&lines));
    let records = Dataset::from_files(["/proc/self/mem"]).read(TfRecords, options);
    assert!(matches!(all(&records), Err(Error::File { .. })), "{:?}", all(&records));
    assert_eq!(skipped.count(), 0, "{:?}", skipped.first());
}
