//! The table of benchmarks.

use comfy_table::{CellAlignment, Table, presets};

use super::results::{Benchmark, Change, Throughput};

/// Changes up to this share are noise, also where the confidence interval excludes 0.
const NOISE: f64 = 0.05;

/// Returns the table, with a column of changes if there is a baseline.
pub(super) fn of(benchmarks: &[Benchmark], has_baseline: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let mut header = vec!["benchmark", "median", "throughput"];
    header.extend(has_baseline.then_some("change (95 %)"));
    table.set_header(header);
    for benchmark in benchmarks {
        let nanoseconds = benchmark.median.nanoseconds;
        let throughput = benchmark.throughput.map(|throughput| rate(throughput, nanoseconds)).unwrap_or_default();
        let mut row = vec![benchmark.name.clone(), time(nanoseconds), throughput];
        if has_baseline {
            row.push(benchmark.change.map_or("new".to_owned(), change));
        }
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Returns a line of a benchmark that is slower than its baseline by more than noise.
pub(super) fn slow_down(benchmark: &Benchmark) -> Option<String> {
    let found = benchmark.change.filter(|change| change.low > 0.0 && change.share > NOISE)?;
    Some(format!("{}: {}", benchmark.name, change(found)))
}

fn change(change: Change) -> String {
    let [share, low, high] = [change.share, change.low, change.high].map(|share| share * 100.0);
    format!("{share:+.1} % ({low:+.1} to {high:+.1} %)")
}

fn time(nanoseconds: f64) -> String {
    scaled(nanoseconds, 1e3, &["ns", "µs", "ms", "s"])
}

fn rate(throughput: Throughput, nanoseconds: f64) -> String {
    match throughput {
        Throughput::Bytes(bytes) => scaled(bytes as f64 / nanoseconds * 1e9, 1e3, &["B/s", "kB/s", "MB/s", "GB/s"]),
        Throughput::Elements(count) => scaled(count as f64 / nanoseconds * 1e9, 1e3, &["/s", "k/s", "M/s", "G/s"]),
    }
}

/// Returns a quantity with three digits or more, in the largest unit of which it is at least 1.
fn scaled(mut quantity: f64, factor: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next();
    while quantity >= factor {
        let Some(larger) = units.next() else { break };
        (quantity, unit) = (quantity / factor, Some(larger));
    }
    let digits = if quantity < 10.0 { 2 } else { usize::from(quantity < 100.0) };
    format!("{quantity:.digits$} {}", unit.unwrap_or(&""))
}

#[cfg(test)]
mod tests {
    use super::super::results::Estimate;
    use super::*;

    fn benchmark(name: &str, nanoseconds: f64, throughput: Option<Throughput>) -> Benchmark {
        Benchmark { name: name.to_owned(), median: Estimate { nanoseconds }, throughput, change: None }
    }

    #[test]
    fn times_and_rates_have_units() {
        for (nanoseconds, text) in [(0.5, "0.50 ns"), (999.0, "999 ns"), (1234.0, "1.23 µs"), (5e10, "50.0 s")] {
            assert_eq!(time(nanoseconds), text);
        }
        assert_eq!(rate(Throughput::Bytes(1 << 20), 1e6), "1.05 GB/s");
        assert_eq!(rate(Throughput::Bytes(1 << 20), 1e3), "1049 GB/s");
        assert_eq!(rate(Throughput::Elements(10_000), 1e6), "10.0 M/s");
    }

    #[test]
    fn a_table_is_one_of_markdown() {
        let mut benchmarks = [
            benchmark("adam", 1.2e6, Some(Throughput::Bytes(1 << 20))),
            benchmark("choice of an algorithm", 62.0, None),
        ];
        let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            lines(of(&benchmarks, false)),
            [
                "| benchmark              |  median | throughput |",
                "|------------------------|---------|------------|",
                "| adam                   | 1.20 ms |   874 MB/s |",
                "| choice of an algorithm | 62.0 ns |            |",
            ]
        );
        benchmarks[0].change = Some(Change { share: -0.123, low: -0.15, high: -0.1 });
        let compared = lines(of(&benchmarks, true));
        assert!(compared[2].ends_with("| -12.3 % (-15.0 to -10.0 %) |"), "{compared:?}");
        assert!(compared[3].ends_with("new |"), "{compared:?}");
    }

    #[test]
    fn noise_is_not_a_slow_down() {
        let with = |low: f64, share: f64| {
            let change = Some(Change { share, low, high: 1.0 });
            slow_down(&Benchmark { change, ..benchmark("a", 1.0, None) })
        };
        assert_eq!((with(-0.1, 0.2), with(0.01, 0.04)), (None, None));
        assert_eq!(with(0.01, 0.2).as_deref(), Some("a: +20.0 % (+1.0 to +100.0 %)"));
    }
}
