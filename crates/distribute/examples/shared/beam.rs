//! Beam search, for the examples that generate sequences.

use candle_core::Result;

/// A decoder with a row of its cache for each hypothesis.
pub(crate) trait Decoder {
    /// Appends a token to each row, and returns the log-probabilities of the tokens that may follow.
    fn step(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>>;

    /// Replaces the rows of the cache by the rows with these indices.
    fn reorder(&mut self, rows: &[u32]) -> Result<()>;
}

/// The limits of a search.
#[derive(Clone, Copy)]
pub(crate) struct Search {
    /// The number of hypotheses that are kept for each sequence: 1 for greedy decoding.
    pub(crate) beam: usize,
    /// The maximum number of tokens.
    pub(crate) length: usize,
    /// The token before the first.
    pub(crate) begin: u32,
    /// The token after the last.
    pub(crate) end: u32,
}

#[derive(Clone)]
struct Hypothesis {
    tokens: Vec<u32>,
    log_probability: f32,
    has_ended: bool,
}

impl Hypothesis {
    /// The log-probability, divided by the length penalty of Wu et al., 2016, equation 14, with α = 0.6.
    fn score(&self) -> f32 {
        self.log_probability / ((5.0 + self.tokens.len() as f32) / 6.0).powf(0.6)
    }
}

impl Search {
    /// Generates as many sequences as are asked for. The decoder has `beam` rows for each, one after another.
    pub(crate) fn run(&self, sequences: usize, decoder: &mut impl Decoder) -> Result<Vec<Vec<u32>>> {
        let first = |at| Hypothesis {
            tokens: Vec::new(),
            log_probability: if at % self.beam == 0 { 0.0 } else { f32::NEG_INFINITY },
            has_ended: false,
        };
        let mut rows: Vec<Hypothesis> = (0..sequences * self.beam).map(first).collect();
        let mut tokens = vec![self.begin; rows.len()];
        for _ in 0..self.length {
            let next = decoder.step(&tokens)?;
            let mut from = Vec::with_capacity(rows.len());
            let mut longer = Vec::with_capacity(rows.len());
            for sequence in (0..rows.len()).step_by(self.beam) {
                for (row, hypothesis) in self.longer(&rows, &next, sequence) {
                    from.push(row as u32);
                    longer.push(hypothesis);
                }
            }
            rows = longer;
            if rows.iter().all(|row| row.has_ended) {
                break;
            }
            if self.beam > 1 {
                decoder.reorder(&from)?;
            }
            tokens = rows.iter().map(|row| row.tokens.last().copied().unwrap_or(self.end)).collect();
        }
        let best = |rows: &[Hypothesis]| {
            let best = rows.iter().max_by(|a, b| a.score().total_cmp(&b.score()));
            best.map_or_else(Vec::new, |best| best.tokens.iter().copied().filter(|token| *token != self.end).collect())
        };
        Ok(rows.chunks(self.beam).map(best).collect())
    }

    /// Returns the best continuations of a sequence's hypotheses, each with the row that it continues.
    fn longer(&self, rows: &[Hypothesis], next: &[Vec<f32>], first: usize) -> Vec<(usize, Hypothesis)> {
        let mut candidates: Vec<(usize, u32, f32)> = Vec::new();
        for row in first..first + self.beam {
            if rows[row].has_ended {
                candidates.push((row, self.end, rows[row].log_probability));
                continue;
            }
            let tokens = (0..).zip(&next[row]);
            candidates.extend(tokens.map(|(token, log)| (row, token, rows[row].log_probability + log)));
        }
        candidates.sort_by(|a, b| b.2.total_cmp(&a.2));
        let continued = |(row, token, log_probability): (usize, u32, f32)| {
            let mut hypothesis = Hypothesis { log_probability, ..rows[row].clone() };
            if !hypothesis.has_ended {
                hypothesis.tokens.push(token);
                hypothesis.has_ended = token == self.end;
            }
            (row, hypothesis)
        };
        candidates.into_iter().take(self.beam).map(continued).collect()
    }
}
