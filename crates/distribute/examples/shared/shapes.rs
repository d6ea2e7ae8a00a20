//! Drawn pictures: a shape of one of ten kinds, in a colour, a size and a place of its own, on another colour.
//!
//! A picture depends only on its split and its number, through arithmetic that is the same on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::{CHANNELS, CLASSES, Split};

/// Points in a pixel, per row and column, that are tested against the shape.
const SAMPLES: usize = 3;

/// Draws pictures; among ten that follow one another, each class occurs once.
pub(super) fn drawn(split: u64, count: usize, side: usize) -> Split {
    let mut drawn = Split::default();
    for number in 0..count {
        let mut hand = Hand(ChaCha8Rng::seed_from_u64(split << 32 | number as u64));
        let class = number % CLASSES;
        drawn.pixels.extend(picture(class, side, &mut hand));
        drawn.classes.push(class as u32);
    }
    drawn
}

fn picture(class: usize, side: usize, hand: &mut Hand) -> Vec<u8> {
    let (paper, mut ink) = (hand.colour(), hand.colour());
    // A shape that cannot be seen has no class.
    while ink.iter().zip(paper).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) < 0.5 {
        ink = hand.colour();
    }
    let radius = hand.between(0.34, 0.46);
    let (x0, y0) = (hand.between(radius, 1.0 - radius), hand.between(radius, 1.0 - radius));
    let (slope, noise) = (hand.between(-0.2, 0.2), 0.08);
    // A turn by the angle whose tangent is the slope.
    let length = (1.0 + slope * slope).sqrt();
    let is_inked = |x: f32, y: f32| {
        let (x, y) = ((x - x0) / radius, (y - y0) / radius);
        is_inside(class, (x + slope * y) / length, (y - slope * x) / length)
    };
    let at = |pixel: usize, sample: usize| (pixel as f32 + (sample as f32 + 0.5) / SAMPLES as f32) / side as f32;
    let mut planes = vec![0; CHANNELS * side * side];
    for (row, column) in (0..side * side).map(|pixel| (pixel / side, pixel % side)) {
        let points = (0..SAMPLES * SAMPLES).map(|sample| (at(column, sample % SAMPLES), at(row, sample / SAMPLES)));
        let cover = points.filter(|(x, y)| is_inked(*x, *y)).count() as f32 / (SAMPLES * SAMPLES) as f32;
        for channel in 0..CHANNELS {
            let colour = paper[channel] + cover * (ink[channel] - paper[channel]) + hand.between(-noise, noise);
            planes[(channel * side + row) * side + column] = (colour.clamp(0.0, 1.0) * 255.0) as u8;
        }
    }
    planes
}

/// Returns whether a point is inside the shape of a class, which reaches from -1 to 1. Mirrored, a shape is one of the
/// same class.
fn is_inside(class: usize, x: f32, y: f32) -> bool {
    let (ax, ay, distance) = (x.abs(), y.abs(), (x * x + y * y).sqrt());
    let in_square = ax <= 0.9 && ay <= 0.9;
    match class {
        // A disc, a ring, a square, a frame.
        0 => distance <= 1.0,
        1 => (0.5..=1.0).contains(&distance),
        2 => in_square,
        3 => in_square && (ax > 0.45 || ay > 0.45),
        // A triangle, and one that stands on its tip.
        4 => ay <= 0.9 && ax <= (y + 0.9) / 1.8,
        5 => ay <= 0.9 && ax <= (0.9 - y) / 1.8,
        // An upright cross, and a diagonal one.
        6 => in_square && (ax <= 0.3 || ay <= 0.3),
        7 => in_square && (ax - ay).abs() <= 0.35,
        // Bars that lie, and bars that stand.
        8 => in_square && !(0.2..=0.6).contains(&ay),
        _ => in_square && !(0.2..=0.6).contains(&ax),
    }
}

/// The randomness of a picture.
struct Hand(ChaCha8Rng);

impl Hand {
    fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.0.next_u32() >> 8) as f32 / (1 << 24) as f32)
    }

    fn colour(&mut self) -> [f32; CHANNELS] {
        std::array::from_fn(|_| self.between(0.0, 1.0))
    }
}
