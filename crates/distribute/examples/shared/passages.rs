//! Passages of pages, for the examples that learn to understand them.

use candle_core::{Device, Result as CandleResult, Tensor};
use distribute::Error;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::word_pieces::WordPieces;

/// The tokens of pages, the last fifth of each apart.
pub(crate) struct Passages {
    pub(crate) pieces: WordPieces,
    seen: Vec<Vec<u32>>,
    held_out: Vec<Vec<u32>>,
    /// The number of tokens of an example.
    length: usize,
}

/// Examples of masked tokens: tokens, and the segment of each, both of shape (examples, length); the positions of those
/// to be predicted, and what they were, both of shape (examples, masked); and whether the second segment follows the
/// first, of shape (examples).
pub(crate) type Masked = (Tensor, Tensor, Tensor, Tensor, Tensor);

impl Passages {
    pub(crate) fn new(pieces: WordPieces, texts: &[String], length: usize) -> distribute::Result<Passages> {
        let (mut seen, mut held_out) = (Vec::new(), Vec::new());
        for text in texts {
            let mut tokens = pieces.encode(text);
            if tokens.len() >= 5 * length {
                held_out.push(tokens.split_off(tokens.len() - tokens.len() / 5));
                seen.push(tokens);
            }
        }
        if seen.len() < 2 {
            let (given, needed) = (seen.len(), 5 * length);
            return Err(Error::program(format!(
                "{given} of the texts have {needed} word pieces or more; give two or more with --text, or a smaller \
                 --length"
            )));
        }
        Ok(Passages { pieces, seen, held_out, length })
    }

    /// Returns the number of tokens that are predicted of an example.
    pub(crate) fn masked(&self) -> usize {
        (self.length * 15).div_ceil(100)
    }

    /// Draws examples with masked tokens. They depend on the seed only.
    pub(crate) fn draw(&self, examples: usize, seed: u64) -> CandleResult<Masked> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut tokens, mut segments, mut positions, mut were, mut follows) = (vec![], vec![], vec![], vec![], vec![]);
        let first = (self.length - 3) / 2;
        for _ in 0..examples {
            let does_follow = below(&mut random, 2) == 1;
            let passage = self.passage(&mut random, self.length - 3);
            let second = if does_follow { &passage[first..] } else { self.passage(&mut random, passage.len() - first) };
            let WordPieces { class, separator, mask, .. } = self.pieces;
            let mut row = [&[class], &passage[..first], &[separator], second, &[separator]].concat();
            // A shuffle of the places of words that stops after those that are masked.
            let mut places: Vec<usize> = (1..row.len() - 1).filter(|place| *place != first + 1).collect();
            for at in 0..self.masked() {
                let other = at + below(&mut random, places.len() - at);
                places.swap(at, other);
                let token = &mut row[places[at]];
                positions.push(places[at] as u32);
                were.push(*token);
                match below(&mut random, 10) {
                    0 => {}
                    1 => *token = below(&mut random, self.pieces.len()) as u32,
                    _ => *token = mask,
                }
            }
            tokens.extend(row);
            segments.extend((0..self.length).map(|at| u32::from(at > first + 1)));
            follows.push(u32::from(does_follow));
        }
        let of = |values: Vec<u32>, each: usize| Tensor::from_vec(values, (examples, each), &Device::Cpu);
        let (length, masked) = (self.length, self.masked());
        let follows = Tensor::from_vec(follows, examples, &Device::Cpu)?;
        Ok((of(tokens, length)?, of(segments, length)?, of(positions, masked)?, of(were, masked)?, follows))
    }

    /// Draws a passage of any page.
    fn passage(&self, random: &mut ChaCha8Rng, length: usize) -> &[u32] {
        let mut at = below(random, self.seen.iter().map(Vec::len).sum());
        let mut pages = self.seen.iter();
        let mut page = &self.seen[0];
        while let Some(next) = pages.next().filter(|_| at >= page.len()) {
            at -= page.len();
            page = next;
        }
        let start = at.min(page.len() - length);
        &page[start..start + length]
    }

    /// Returns passages of the longest pages, whose numbers are their classes: a number of each from the part that was
    /// seen, and all from the part that was not. Tokens are of shape (passages, length).
    pub(crate) fn classes(&self, classes: usize, each: usize) -> CandleResult<[(Tensor, Tensor); 2]> {
        let mut longest: Vec<usize> = (0..self.seen.len()).collect();
        longest.sort_by_key(|page| std::cmp::Reverse(self.seen[*page].len()));
        longest.truncate(classes);
        let of = |pages: &[Vec<u32>], each: usize| {
            let (mut tokens, mut labels) = (Vec::new(), Vec::new());
            for (label, page) in longest.iter().enumerate() {
                let passages: Vec<&[u32]> = pages[*page].chunks_exact(self.length - 2).collect();
                let count = passages.len().min(each);
                for at in 0..count {
                    tokens.push(self.pieces.class);
                    tokens.extend(passages[at * passages.len() / count]);
                    tokens.push(self.pieces.separator);
                    labels.push(label as u32);
                }
            }
            let count = labels.len();
            Ok::<_, candle_core::Error>((
                Tensor::from_vec(tokens, (count, self.length), &Device::Cpu)?,
                Tensor::from_vec(labels, count, &Device::Cpu)?,
            ))
        };
        Ok([of(&self.seen, each)?, of(&self.held_out, usize::MAX)?])
    }
}

fn below(random: &mut ChaCha8Rng, bound: usize) -> usize {
    ((u64::from(random.next_u32()) * bound as u64) >> 32) as usize
}
