//! `cargo xtask bench allreduce` and its like: the table that users of nccl-tests know.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use distribute::collectives::{Algorithm, ProcessGroup, Rank, ReduceOp};
use distribute::device::{DType, Element};
use serde::{Deserialize, Serialize};

use super::peers::{self, Peer};
use super::processes::{self, Ranks};
use super::spread::spread;
use super::{limits, plot};
use crate::error::text;

#[derive(Args, Clone)]
pub(crate) struct Flags {
    /// Transports: local (threads of one process), shm, tcp and grpc (processes); with TLS shm+tls, tcp+tls and
    /// grpc+tls.
    #[arg(long, value_delimiter = ',', default_value = "local,shm,tcp,grpc")]
    transport: Vec<String>,
    /// Rank counts.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Bytes of the longer buffer of a rank, such as 4,64K,64M.
    #[arg(long, value_delimiter = ',', default_value = "4,1K,64K,1M,16M,64M,256M")]
    pub(super) sizes: Vec<String>,
    /// Element type.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Reduction.
    #[arg(long, default_value = "sum")]
    op: String,
    /// Algorithms of the all-reduce between processes: auto, ring, recursive-doubling, halving-doubling, tree,
    /// double-tree.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub(super) algorithm: Vec<String>,
    /// Measured repetitions; by default as many as fit into a quarter of a second, at least 5.
    #[arg(long)]
    reps: Option<usize>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Draws bus bandwidth over size into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Alternates with this peer on the same work, where it is installed: openmpi, gloo, tensorflow.
    #[arg(long, value_delimiter = ',')]
    compare: Vec<Peer>,
}

impl Flags {
    /// Refuses comparisons with peers in which they do other work: theirs is a sum of f32, by the algorithm that they
    /// choose, as often as fits into a quarter of a second.
    ///
    /// # Errors
    /// A message that names the setting.
    fn check(&self, operation: Operation) -> Result<(), String> {
        let (dtype, sum) = (DType::F32.name(), ReduceOp::Sum.name());
        let refused = |what: &str| Err(format!("--compare is of the all-reduce of {dtype}, {sum}, by `auto`: {what}"));
        match self {
            Flags { compare, .. } if compare.is_empty() => Ok(()),
            _ if operation != Operation::AllReduce => refused(&format!("it is not there for {}", operation.name())),
            Flags { dtype: given, .. } if given != dtype => refused("leave --dtype out"),
            Flags { op, .. } if op != sum => refused("leave --op out"),
            Flags { algorithm, .. } if algorithm != &["auto"] => refused("leave --algorithm out"),
            Flags { reps: Some(_), .. } => refused("leave --reps out"),
            Flags { .. } => Ok(()),
        }
    }
}

/// The operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "allreduce",
            Operation::AllGather => "allgather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::AllToAll => "alltoall",
        }
    }

    /// Bus bandwidth over algorithm bandwidth: the bytes that must pass each rank's link, over the size.
    ///
    /// Source: nccl-tests, doc/PERFORMANCE.md.
    fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => (n - 1.0) / n,
            Operation::Broadcast => 1.0,
        }
    }
}

/// One line of the table. Times in microseconds, rates in 10^9 bytes per second.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) bench: String,
    pub(super) transport: String,
    pub(super) algorithm: String,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    pub(super) dtype: String,
    pub(super) op: String,
    pub(super) time_us: f64,
    pub(super) time_us_min: f64,
    pub(super) time_us_max: f64,
    pub(super) algbw_gb_s: f64,
    pub(super) busbw_gb_s: f64,
    pub(super) wrong: usize,
}

pub(crate) fn run(operation: Operation, flags: &Flags) -> Result<(), String> {
    flags.check(operation)?;
    let sizes: Vec<usize> = flags.sizes.iter().map(|size| parse_size(size)).collect::<Result<_, _>>()?;
    for name in &flags.algorithm {
        name.parse::<Algorithm>().map_err(text)?;
    }
    let mut rows = Vec::new();
    if !flags.json {
        println!(
            "# {}; times in µs, algbw and busbw in GB/s (10^9 bytes); busbw = algbw × {:.2} for 2 ranks",
            operation.name(),
            operation.bus_factor(2)
        );
        println!(
            "{:>9} {:>5} {:>12} {:>11} {:>5} {:>5} {:>18} {:>11} {:>11} {:>11} {:>8} {:>8} {:>6}  share of limit",
            "transport",
            "ranks",
            "size",
            "count",
            "type",
            "redop",
            "algorithm",
            "time",
            "min",
            "max",
            "algbw",
            "busbw",
            "#wrong"
        );
    }
    for transport in &flags.transport {
        let loopback = if transport == "local" { None } else { Some(limits::loopback_both_ways()?) };
        for ranks in &flags.ranks {
            let mut show = |row: Row| -> Result<(), String> {
                print_row(operation, flags, &row, loopback)?;
                rows.push(row);
                Ok(())
            };
            if transport == "local" {
                for bytes in &sizes {
                    show(measure_local(operation, flags, *ranks, *bytes)?)?;
                }
                continue;
            }
            for algorithm in &flags.algorithm {
                for row in measure_processes(operation, flags, transport, *ranks, algorithm)? {
                    show(row)?;
                }
            }
        }
    }
    peers::compare(operation, flags, &flags.compare, &flags.ranks)?;
    if let Some(path) = &flags.plot {
        plot::draw(path, operation, &rows)?;
        println!("drawn: {}", path.display());
    }
    match rows.iter().map(|row| row.wrong).sum() {
        0 => Ok(()),
        wrong => Err(format!("{wrong} elements were wrong")),
    }
}

/// Returns rows whose results are right.
///
/// # Errors
/// A message that names the first row with elements that were wrong.
pub(super) fn correct(rows: Vec<Row>) -> Result<Vec<Row>, String> {
    match rows.iter().find(|row| row.wrong > 0) {
        None => Ok(rows),
        Some(Row { bench, transport, algorithm, ranks, bytes, wrong, .. }) => Err(format!(
            "{wrong} elements of {bench} over {transport} by {algorithm} were wrong, {bytes} bytes on {ranks} ranks"
        )),
    }
}

/// The median seconds of an all-reduce of f32 between processes, for each size.
///
/// # Errors
/// A message, if a process fails or a result is wrong.
pub(crate) fn median_seconds(
    transport: &str,
    ranks: usize,
    algorithm: &str,
    sizes: &[usize],
) -> Result<Vec<f64>, String> {
    let flags = Flags {
        transport: vec![transport.to_owned()],
        ranks: vec![ranks],
        sizes: sizes.iter().map(usize::to_string).collect(),
        dtype: DType::F32.name().to_owned(),
        op: ReduceOp::Sum.name().to_owned(),
        algorithm: vec![algorithm.to_owned()],
        reps: None,
        json: true,
        plot: None,
        compare: Vec::new(),
    };
    let rows = correct(measure_processes(Operation::AllReduce, &flags, transport, ranks, algorithm)?)?;
    Ok(rows.into_iter().map(|row| row.time_us * 1e-6).collect())
}

/// One measurement between processes of all sizes.
pub(super) fn measure_processes(
    operation: Operation,
    flags: &Flags,
    transport: &str,
    ranks: usize,
    algorithm: &str,
) -> Result<Vec<Row>, String> {
    let (kind, uses_tls) = processes::kind_of(transport);
    if !["shm", "tcp", "grpc"].contains(&kind) {
        let expected = "local, shm, tcp or grpc, or one of the last three with +tls";
        return Err(format!("transport {transport:?} is not known; give {expected}"));
    }
    let mut rows = Vec::new();
    let arguments = rank_arguments(operation, flags, transport);
    let ranks = Ranks { count: ranks, transport, algorithm, threads: Some(1) };
    processes::run(&ranks, &arguments, Duration::from_secs(600), |line| {
        let mut row: Row = serde_json::from_str(line).map_err(|error| format!("{error}: {line}"))?;
        if uses_tls {
            // The processes know their group's transport by its own name.
            row.transport = transport.to_owned();
        }
        rows.push(row);
        Ok(())
    })?;
    Ok(rows)
}

/// One process of a measurement between processes; rank 0 prints.
pub(crate) fn run_rank(operation: Operation, flags: &Flags) -> Result<(), String> {
    let group = ProcessGroup::from_env().map_err(text)?;
    for size in &flags.sizes {
        let row = measure_on(operation, flags, &group, parse_size(size)?)?;
        if group.rank().0 == 0 {
            println!("{}", serde_json::to_string(&row).map_err(text)?);
        }
    }
    group.barrier().map_err(text)
}

fn rank_arguments(operation: Operation, flags: &Flags, transport: &str) -> Vec<String> {
    let mut arguments: Vec<String> =
        ["bench", "rank", operation.name(), "--transport", transport].map(str::to_owned).into();
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

fn measure_local(operation: Operation, flags: &Flags, ranks: usize, bytes: usize) -> Result<Row, String> {
    let groups = ProcessGroup::local(ranks).map_err(text)?;
    std::thread::scope(|scope| {
        let handles: Vec<_> =
            groups.iter().map(|group| scope.spawn(move || measure_on(operation, flags, group, bytes))).collect();
        let mut rows = Vec::new();
        for handle in handles {
            rows.push(handle.join().map_err(|_| "a rank panicked".to_owned())??);
        }
        Ok(rows.swap_remove(0))
    })
}

fn measure_on(operation: Operation, flags: &Flags, group: &ProcessGroup, bytes: usize) -> Result<Row, String> {
    macro_rules! measure {
        ($($dtype:ident: $type:ty = $make:expr),*) => {
            match flags.dtype.parse::<DType>().map_err(text)? {
                $(DType::$dtype => measure::<$type>(operation, flags, group, bytes, $make),)*
            }
        };
    }
    measure!(
        F32: f32 = |x| x as f32, F64: f64 = f64::from, F16: half::f16 = |x| half::f16::from_f32(x as f32),
        BF16: half::bf16 = |x| half::bf16::from_f32(x as f32), I8: i8 = |x| x as i8, U8: u8 = |x| x as u8,
        I32: i32 = |x| x as i32, U32: u32 = |x| x, I64: i64 = i64::from, U64: u64 = u64::from
    )
}

/// Small whole numbers are exact in every type, so every result can be compared for equality.
fn value(rank: usize, index: usize) -> u32 {
    ((rank + index) % 3 + 1) as u32
}

/// The buffers of one rank, and what is done with them.
struct Work<'a, T> {
    operation: Operation,
    group: &'a ProcessGroup,
    op: ReduceOp,
    input: Vec<T>,
    output: Vec<T>,
    calls: usize,
}

impl<'a, T: Element> Work<'a, T> {
    fn new(operation: Operation, group: &'a ProcessGroup, op: ReduceOp, count: usize) -> Work<'a, T> {
        let world = group.world_size();
        let part = count / world;
        let (input, output) = match operation {
            Operation::AllReduce | Operation::Broadcast => (0, count),
            Operation::AllGather => (part, part * world),
            Operation::ReduceScatter => (part * world, part),
            Operation::AllToAll => (part * world, part * world),
        };
        let zeros = |len| vec![T::default(); len];
        Work { operation, group, op, input: zeros(input), output: zeros(output), calls: 0 }
    }

    /// Returns the root of a call. Roots take turns, so that no rank runs ahead of the others.
    fn root(&self, call: usize) -> usize {
        call % self.group.world_size()
    }

    fn call(&mut self) -> Result<(), String> {
        let root = Rank(self.root(self.calls) as u32);
        self.calls += 1;
        let (group, input, output) = (self.group, &self.input, &mut self.output);
        match self.operation {
            Operation::AllReduce => group.all_reduce(output, self.op),
            Operation::AllGather => group.all_gather(input, output),
            Operation::ReduceScatter => group.reduce_scatter(input, output, self.op),
            Operation::Broadcast => group.broadcast(output, root),
            Operation::AllToAll => group.all_to_all(input, output),
        }
        .map_err(text)
    }

    /// Calls once with known values; how many elements come out wrong.
    fn verify(&mut self, make: fn(u32) -> T) -> Result<usize, String> {
        let rank = self.group.rank().index();
        let fill = |values: &mut [T]| (0..).zip(values).for_each(|(index, place)| *place = make(value(rank, index)));
        fill(&mut self.input);
        fill(&mut self.output);
        self.call()?;
        let wrong = self.wrong(make);
        // Sums in place of what is there would leave the range of small types when they are repeated; the sum of zeros
        // costs the same. An input of its own stays as it is.
        self.output.fill(T::default());
        Ok(wrong)
    }

    /// Returns how many elements are wrong after a call with known values.
    fn wrong(&self, make: fn(u32) -> T) -> usize {
        let (rank, world, root) = (self.group.rank().index(), self.group.world_size(), self.root(self.calls - 1));
        let (operation, op, part) = (self.operation, self.op, self.output.len() / world);
        let want = |index: usize| match operation {
            Operation::AllReduce => expected(op, world, index, make),
            Operation::ReduceScatter => expected(op, world, rank * self.output.len() + index, make),
            Operation::Broadcast => make(value(root, index)),
            Operation::AllGather => make(value(index / part, index % part)),
            Operation::AllToAll => make(value(index / part, rank * part + index % part)),
        };
        (0..).zip(&self.output).filter(|(index, got)| **got != want(*index)).count()
    }
}

fn measure<T: Element>(
    operation: Operation,
    flags: &Flags,
    group: &ProcessGroup,
    bytes: usize,
    make: fn(u32) -> T,
) -> Result<Row, String> {
    let op: ReduceOp = flags.op.parse().map_err(text)?;
    let world = group.world_size();
    let mut work = Work::<T>::new(operation, group, op, bytes / size_of::<T>());
    let mut wrong = work.verify(make)?;
    for _ in 0..3 {
        work.call()?;
    }
    let warm = Instant::now();
    work.call()?;
    let estimate = warm.elapsed().as_secs_f64().max(1e-7);
    let mut repetitions = [flags.reps.unwrap_or(((0.25 / estimate) as usize).clamp(5, 20_000)) as u64];
    // All ranks must repeat equally often.
    group.broadcast(&mut repetitions, Rank(0)).map_err(text)?;
    let mut seconds = Vec::with_capacity(repetitions[0] as usize);
    for _ in 0..repetitions[0] {
        let started = Instant::now();
        work.call()?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    if !work.input.is_empty() {
        // The results of the measured calls are here.
        wrong += work.wrong(make);
    }
    wrong += work.verify(make)?;
    let mut wrong_anywhere = [wrong as u64];
    group.all_reduce(&mut wrong_anywhere, ReduceOp::Sum).map_err(text)?;
    let (middle, least, greatest) = spread(seconds);
    let algbw = bytes as f64 / middle / 1e9;
    let algorithm = match (group.transport_name(), operation) {
        ("local", _) => "shared-chunks".to_owned(),
        (_, Operation::AllReduce) => group.algorithm_for(bytes).name().to_owned(),
        _ => "auto".to_owned(),
    };
    Ok(Row {
        bench: operation.name().to_owned(),
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
        busbw_gb_s: algbw * operation.bus_factor(world),
        wrong: wrong_anywhere[0] as usize,
    })
}

fn expected<T: Element>(op: ReduceOp, world: usize, index: usize, make: fn(u32) -> T) -> T {
    let values = (0..world).map(|rank| value(rank, index));
    match op {
        ReduceOp::Min => make(values.min().unwrap_or(0)),
        ReduceOp::Max => make(values.max().unwrap_or(0)),
        ReduceOp::Product => make(values.product()),
        ReduceOp::BitAnd => make(values.fold(u32::MAX, |a, b| a & b)),
        ReduceOp::BitOr => make(values.fold(0, |a, b| a | b)),
        ReduceOp::BitXor => make(values.fold(0, |a, b| a ^ b)),
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

fn print_row(operation: Operation, flags: &Flags, row: &Row, loopback: Option<f64>) -> Result<(), String> {
    if flags.json {
        println!("{}", serde_json::to_string(row).map_err(text)?);
        return Ok(());
    }
    let share = match loopback {
        // Every byte that a rank sends and receives passes through loopback in both directions at once.
        Some(rate) if row.bytes >= 1 << 20 => {
            format!("{:.2} of loopback's {:.1} GB/s each way", row.busbw_gb_s * 1e9 / rate, rate / 1e9)
        }
        None if operation == Operation::AllReduce && row.bytes >= 1 << 20 && row.dtype == "f32" && row.op == "sum" => {
            let limit = limits::memory_all_reduce(row.ranks, row.bytes, 9);
            format!("{:.2} of memory's {:.0} µs", limit * 1e6 / row.time_us, limit * 1e6)
        }
        _ => String::new(),
    };
    let count = row.bytes / row.dtype.parse::<DType>().map_err(text)?.size_bytes();
    println!(
        "{:>9} {:>5} {:>12} {:>11} {:>5} {:>5} {:>18} {:>11.2} {:>11.2} {:>11.2} {:>8.3} {:>8.3} {:>6}  {share}",
        row.transport,
        row.ranks,
        row.bytes,
        count,
        row.dtype,
        row.op,
        row.algorithm,
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

#[cfg(test)]
mod tests;
