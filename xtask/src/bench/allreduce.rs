//! `cargo xtask bench allreduce`: the table that users of nccl-tests know.

use std::time::{Duration, Instant};

use clap::Args;
use distribute::collectives::{ProcessGroup, ReduceOp};
use distribute::device::{DType, Element};
use serde::{Deserialize, Serialize};

use super::{limits, processes, spread, text};

#[derive(Args, Clone)]
pub(crate) struct Flags {
    /// Transports: local (threads of one process), shm, tcp and grpc (processes).
    #[arg(long, value_delimiter = ',', default_value = "local,shm,tcp,grpc")]
    transport: Vec<String>,
    /// Rank counts.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Bytes per rank, such as 4,64K,64M.
    #[arg(long, value_delimiter = ',', default_value = "4,1K,64K,1M,16M,64M,256M")]
    sizes: Vec<String>,
    /// Element type.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Reduction.
    #[arg(long, default_value = "sum")]
    op: String,
    /// Measured repetitions; by default as many as fit into a quarter of a second, at least 5.
    #[arg(long)]
    reps: Option<usize>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// One line of the table. Times in microseconds, rates in 10^9 bytes per second.
#[derive(Serialize, Deserialize)]
struct Row {
    bench: String,
    transport: String,
    algorithm: String,
    ranks: usize,
    bytes: usize,
    dtype: String,
    op: String,
    time_us: f64,
    time_us_min: f64,
    time_us_max: f64,
    algbw_gb_s: f64,
    busbw_gb_s: f64,
    wrong: usize,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let sizes: Vec<usize> = flags.sizes.iter().map(|size| parse_size(size)).collect::<Result<_, _>>()?;
    let mut wrong = 0;
    if !flags.json {
        println!("# times in µs, algbw and busbw in GB/s (10^9 bytes); busbw = algbw × 2 (n - 1) / n");
        println!(
            "{:>9} {:>5} {:>12} {:>11} {:>5} {:>5} {:>11} {:>11} {:>11} {:>8} {:>8} {:>6}  share of limit",
            "transport", "ranks", "size", "count", "type", "redop", "time", "min", "max", "algbw", "busbw", "#wrong"
        );
    }
    for transport in &flags.transport {
        let loopback = if transport == "local" { None } else { Some(limits::loopback_both_ways()?) };
        for ranks in &flags.ranks {
            let mut show = |row: &Row| -> Result<(), String> {
                wrong += row.wrong;
                print_row(flags, row, loopback)
            };
            match transport.as_str() {
                "local" => {
                    for bytes in &sizes {
                        show(&measure_local(flags, *ranks, *bytes)?)?;
                    }
                }
                "shm" | "tcp" | "grpc" => {
                    let arguments = rank_arguments(flags, transport);
                    processes::run(*ranks, &arguments, transport, Duration::from_secs(600), |line| {
                        show(&serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))?)
                    })?;
                }
                other => return Err(format!("transport {other:?} is not known; give local, shm, tcp or grpc")),
            }
        }
    }
    if wrong == 0 { Ok(()) } else { Err(format!("{wrong} elements were wrong")) }
}

/// One process of a measurement between processes; rank 0 prints.
pub(crate) fn run_rank(flags: &Flags) -> Result<(), String> {
    let group = ProcessGroup::from_env().map_err(text)?;
    for size in &flags.sizes {
        let row = measure_on(flags, &group, parse_size(size)?)?;
        if group.rank().0 == 0 {
            println!("{}", serde_json::to_string(&row).map_err(text)?);
        }
    }
    group.barrier().map_err(text)
}

fn rank_arguments(flags: &Flags, transport: &str) -> Vec<String> {
    let mut arguments: Vec<String> = ["bench", "rank", "allreduce", "--transport", transport].map(str::to_owned).into();
    for (flag, value) in
        [("--sizes", flags.sizes.join(",")), ("--dtype", flags.dtype.clone()), ("--op", flags.op.clone())]
    {
        arguments.extend([flag.to_owned(), value]);
    }
    if let Some(reps) = flags.reps {
        arguments.extend(["--reps".to_owned(), reps.to_string()]);
    }
    arguments
}

fn measure_local(flags: &Flags, ranks: usize, bytes: usize) -> Result<Row, String> {
    let groups = ProcessGroup::local(ranks).map_err(text)?;
    std::thread::scope(|scope| {
        let handles: Vec<_> = groups.iter().map(|group| scope.spawn(move || measure_on(flags, group, bytes))).collect();
        let mut rows = Vec::new();
        for handle in handles {
            rows.push(handle.join().map_err(|_| "a rank panicked".to_owned())??);
        }
        let wrong = rows.iter().map(|row| row.wrong).sum();
        Ok(Row { wrong, ..rows.swap_remove(0) })
    })
}

fn measure_on(flags: &Flags, group: &ProcessGroup, bytes: usize) -> Result<Row, String> {
    match flags.dtype.parse::<DType>().map_err(text)? {
        DType::F32 => measure::<f32>(flags, group, bytes, |x| x as f32),
        DType::F64 => measure::<f64>(flags, group, bytes, |x| x as f64),
        DType::F16 => measure::<half::f16>(flags, group, bytes, |x| half::f16::from_f32(x as f32)),
        DType::BF16 => measure::<half::bf16>(flags, group, bytes, |x| half::bf16::from_f32(x as f32)),
        DType::I8 => measure::<i8>(flags, group, bytes, |x| x as i8),
        DType::U8 => measure::<u8>(flags, group, bytes, |x| x as u8),
        DType::I32 => measure::<i32>(flags, group, bytes, |x| x as i32),
        DType::U32 => measure::<u32>(flags, group, bytes, |x| x),
        DType::I64 => measure::<i64>(flags, group, bytes, |x| x as i64),
        DType::U64 => measure::<u64>(flags, group, bytes, |x| x as u64),
    }
}

/// Small whole numbers are exact in every type, so every result can be compared for equality.
fn value(rank: usize, index: usize) -> u32 {
    ((rank + index) % 3 + 1) as u32
}

fn measure<T: Element>(flags: &Flags, group: &ProcessGroup, bytes: usize, make: fn(u32) -> T) -> Result<Row, String> {
    let op: ReduceOp = flags.op.parse().map_err(text)?;
    let (rank, world) = (group.rank().index(), group.world_size());
    let count = bytes / size_of::<T>();
    let fill =
        |values: &mut [T]| (0..).zip(values).for_each(|(index, value_here)| *value_here = make(value(rank, index)));
    let mut values = vec![T::default(); count];
    fill(&mut values);
    group.all_reduce(&mut values, op).map_err(text)?;
    let wrong = (0..).zip(&values).filter(|(index, got)| **got != expected(op, world, *index, make)).count();
    // Repeated sums of ones and twos would leave the range of small types; the sum of zeros costs the same.
    values.fill(T::default());
    for _ in 0..2 {
        group.all_reduce(&mut values, op).map_err(text)?;
    }
    let warm = Instant::now();
    group.all_reduce(&mut values, op).map_err(text)?;
    let estimate = warm.elapsed().as_secs_f64().max(1e-7);
    let mut repetitions = [flags.reps.unwrap_or(((0.25 / estimate) as usize).clamp(5, 20_000)) as u64];
    // All ranks must repeat equally often.
    group.broadcast(&mut repetitions, distribute::collectives::Rank(0)).map_err(text)?;
    let mut seconds = Vec::with_capacity(repetitions[0] as usize);
    for _ in 0..repetitions[0] {
        let started = Instant::now();
        group.all_reduce(&mut values, op).map_err(text)?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    let mut wrong_anywhere = [wrong as u64];
    group.all_reduce(&mut wrong_anywhere, ReduceOp::Sum).map_err(text)?;
    let (middle, least, greatest) = spread(seconds);
    let algbw = bytes as f64 / middle / 1e9;
    let algorithm = if group.transport_name() == "local" {
        "shared-chunks".to_owned()
    } else {
        group.algorithm_for(bytes).name().to_owned()
    };
    Ok(Row {
        bench: "allreduce".to_owned(),
        transport: group.transport_name().to_owned(),
        algorithm,
        ranks: world,
        bytes,
        dtype: flags.dtype.clone(),
        op: flags.op.clone(),
        time_us: middle * 1e6,
        time_us_min: least * 1e6,
        time_us_max: greatest * 1e6,
        algbw_gb_s: algbw,
        busbw_gb_s: algbw * 2.0 * (world - 1) as f64 / world as f64,
        wrong: if group.transport_name() == "local" { wrong } else { wrong_anywhere[0] as usize },
    })
}

fn expected<T: Element>(op: ReduceOp, world: usize, index: usize, make: fn(u32) -> T) -> T {
    let values = (0..world).map(|rank| value(rank, index));
    match op {
        ReduceOp::Min => make(values.min().unwrap_or(0)),
        ReduceOp::Max => make(values.max().unwrap_or(0)),
        ReduceOp::Product => make(values.product()),
        ReduceOp::Mean => {
            let sum: u32 = values.sum();
            // One group alone computes the quotient the way the type does.
            let mut quotient = [make(sum)];
            divide(&mut quotient, world as u32);
            quotient[0]
        }
        _ => make(values.sum()),
    }
}

fn divide<T: Element>(value: &mut [T; 1], n: u32) {
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(value);
    match T::DTYPE {
        DType::F32 => bytemuck::cast_slice_mut::<u8, f32>(bytes)[0] /= n as f32,
        DType::F64 => bytemuck::cast_slice_mut::<u8, f64>(bytes)[0] /= f64::from(n),
        DType::F16 => {
            let x = &mut bytemuck::cast_slice_mut::<u8, half::f16>(bytes)[0];
            *x = half::f16::from_f32(x.to_f32() / n as f32);
        }
        DType::BF16 => {
            let x = &mut bytemuck::cast_slice_mut::<u8, half::bf16>(bytes)[0];
            *x = half::bf16::from_f32(x.to_f32() / n as f32);
        }
        DType::I8 => bytemuck::cast_slice_mut::<u8, i8>(bytes)[0] /= n as i8,
        DType::U8 => bytes[0] /= n as u8,
        DType::I32 => bytemuck::cast_slice_mut::<u8, i32>(bytes)[0] /= n as i32,
        DType::U32 => bytemuck::cast_slice_mut::<u8, u32>(bytes)[0] /= n,
        DType::I64 => bytemuck::cast_slice_mut::<u8, i64>(bytes)[0] /= i64::from(n),
        DType::U64 => bytemuck::cast_slice_mut::<u8, u64>(bytes)[0] /= u64::from(n),
    }
}

fn print_row(flags: &Flags, row: &Row, loopback: Option<f64>) -> Result<(), String> {
    if flags.json {
        println!("{}", serde_json::to_string(row).map_err(text)?);
        return Ok(());
    }
    let share = match loopback {
        // Every byte that a rank sends and receives passes through loopback in both directions at once.
        Some(rate) if row.bytes >= 1 << 20 => {
            format!("{:.2} of loopback's {:.1} GB/s each way", row.busbw_gb_s * 1e9 / rate, rate / 1e9)
        }
        None if row.bytes >= 1 << 20 && row.dtype == "f32" && row.op == "sum" => {
            let limit = limits::memory_all_reduce(row.ranks, row.bytes, 9);
            format!("{:.2} of memory's {:.0} µs", limit * 1e6 / row.time_us, limit * 1e6)
        }
        _ => String::new(),
    };
    let count = row.bytes / row.dtype.parse::<DType>().map_err(text)?.size_bytes();
    println!(
        "{:>9} {:>5} {:>12} {:>11} {:>5} {:>5} {:>11.2} {:>11.2} {:>11.2} {:>8.3} {:>8.3} {:>6}  {share}",
        row.transport,
        row.ranks,
        row.bytes,
        count,
        row.dtype,
        row.op,
        row.time_us,
        row.time_us_min,
        row.time_us_max,
        row.algbw_gb_s,
        row.busbw_gb_s,
        row.wrong
    );
    Ok(())
}

/// Reads 4, 64K, 1M or 2G, in powers of 1024.
pub(crate) fn parse_size(given: &str) -> Result<usize, String> {
    let (digits, factor) = match given.char_indices().last() {
        Some((end, 'K' | 'k')) => (&given[..end], 1 << 10),
        Some((end, 'M' | 'm')) => (&given[..end], 1 << 20),
        Some((end, 'G' | 'g')) => (&given[..end], 1 << 30),
        _ => (given, 1),
    };
    let size = digits.parse::<usize>().ok().and_then(|digits| digits.checked_mul(factor));
    size.ok_or_else(|| format!("size {given:?} is not of the form 4, 64K, 1M or 2G"))
}
