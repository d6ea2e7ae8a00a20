//! Drawing of digits that imitates handwriting: no two images are alike, and each is the same on every machine.
//!
//! All randomness of an image comes from a ChaCha8 stream keyed by seed, split and index, and everything computed from
//! it uses operations that IEEE 754 rounds correctly, so that no mathematics library influences it.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::glyphs::{self, Glyph, Point, Stroke};
use super::{CLASSES, PIXELS, SIDE, Split};

pub(super) const TRAIN: u64 = 0;
pub(super) const TEST: u64 = 1;

pub(super) fn split(seed: u64, split: u64, len: usize) -> Split {
    let mut images = Vec::with_capacity(len * PIXELS);
    let mut path = Vec::new();
    let labels: Vec<u32> = (0..len as u64).map(|index| label(seed, split, index)).collect();
    for (index, label) in labels.iter().enumerate() {
        let mut hand = Hand::new(seed, [PICTURE, split, index as u64]);
        images.extend_from_slice(&draw(*label, &mut hand, &mut path));
    }
    Split { images, labels }
}

/// Returns the label of an image; each block of ten has its own order of the ten digits.
fn label(seed: u64, split: u64, index: u64) -> u32 {
    let mut hand = Hand::new(seed, [ORDER, split, index / CLASSES as u64]);
    let mut order: [u32; CLASSES] = std::array::from_fn(|digit| digit as u32);
    for last in (1..CLASSES).rev() {
        order.swap(last, hand.below(last as u32 + 1) as usize);
    }
    order[(index % CLASSES as u64) as usize]
}

fn draw(digit: u32, hand: &mut Hand, path: &mut Vec<[Point; 2]>) -> [f32; PIXELS] {
    let styles = glyphs::styles(digit);
    let glyph = styles[hand.below(styles.len() as u32) as usize];
    let pose = Pose::random(hand);
    trace(glyph, &pose, path);

    let radius = hand.between(0.75, 1.75);
    // Width of the fringe from full ink to none: a sharp pen or a wet one.
    let fringe = hand.between(1.0, 2.0);
    let ink = hand.between(0.75, 1.0);
    let mut distances = [f32::INFINITY; PIXELS];
    for segment in path.iter() {
        mark(&mut distances, *segment, radius + fringe / 2.0);
    }
    let mut image = hand.grain();
    // Apart from the random stream, so that the loop is vectorised.
    for (pixel, squared) in image.iter_mut().zip(&distances) {
        let cover = ((radius - squared.sqrt()) / fringe + 0.5).clamp(0.0, 1.0);
        let grain = *pixel * (BACKGROUND_GRAIN + INK_GRAIN * cover);
        *pixel = quantised((cover * ink + grain).clamp(0.0, 1.0));
    }
    image
}

/// The placement of the glyph's box on the paper.
struct Pose {
    /// Displacements of a grid over the box, which vary the style of writing.
    warp: [[Point; GRID]; GRID],
    matrix: [[f32; 2]; 2],
    centre: Point,
}

impl Pose {
    fn random(hand: &mut Hand) -> Self {
        let warp =
            std::array::from_fn(|_| std::array::from_fn(|_| (hand.between(-WARP, WARP), hand.between(-WARP, WARP))));
        let (width, height) = (hand.between(10.5, 16.0), hand.between(15.5, 20.0));
        let shear = hand.between(-0.25, 0.25);
        let (sin, cos) = small_sin_cos(hand.between(-MAX_TURN, MAX_TURN));
        // Rotation · shear · scale.
        let matrix = [[cos * width, (cos * shear - sin) * height], [sin * width, (sin * shear + cos) * height]];
        let middle = SIDE as f32 / 2.0;
        // The mean of two draws: most digits are near the middle, few at the full three pixels.
        let mut shift = || (hand.between(-3.0, 3.0) + hand.between(-3.0, 3.0)) / 2.0;
        let centre = (middle + shift(), middle + shift());
        Self { warp, matrix, centre }
    }

    /// Maps a point of the glyph's box to the paper.
    fn place(&self, point: Point) -> Point {
        let (dx, dy) = self.displacement(point);
        let (x, y) = (point.0 + dx - 0.5, point.1 + dy - 0.5);
        let [[a, b], [c, d]] = self.matrix;
        (self.centre.0 + a * x + b * y, self.centre.1 + c * x + d * y)
    }

    fn displacement(&self, (x, y): Point) -> Point {
        let cell = |at: f32| {
            let at = at.clamp(0.0, 1.0) * (GRID - 1) as f32;
            let low = (at as usize).min(GRID - 2);
            (low, at - low as f32)
        };
        let ((column, fx), (row, fy)) = (cell(x), cell(y));
        let along = |row: usize| mix(self.warp[row][column], self.warp[row][column + 1], fx);
        mix(along(row), along(row + 1), fy)
    }
}

/// Computes the glyph's strokes on the paper, as short straight segments.
fn trace(glyph: Glyph, pose: &Pose, path: &mut Vec<[Point; 2]>) {
    path.clear();
    for Stroke { smooth, points } in glyph {
        let last = points.len() - 1;
        let at = |index: usize| pose.place(points[index.min(last)]);
        for index in 0..last {
            let (from, to) = (at(index), at(index + 1));
            if !smooth {
                path.push([from, to]);
                continue;
            }
            let (before, after) = (at(index.saturating_sub(1)), at(index + 2));
            let mut pen = from;
            for piece in 1..=PIECES {
                let next = catmull_rom([before, from, to, after], piece as f32 / PIECES as f32);
                path.push([pen, next]);
                pen = next;
            }
        }
    }
}

/// Lowers the squared distances of the pixels within `reach` of a segment.
fn mark(distances: &mut [f32; PIXELS], [a, b]: [Point; 2], reach: f32) {
    let span = |p: f32, q: f32| {
        // Pixel centres are at halves.
        let first = (p.min(q) - reach - 0.5).ceil().clamp(0.0, SIDE as f32) as usize;
        let end = (p.max(q) + reach + 0.5).floor().clamp(0.0, SIDE as f32) as usize;
        first..end.max(first)
    };
    let (columns, rows) = (span(a.0, b.0), span(a.1, b.1));
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let length = dx * dx + dy * dy;
    let inverse = if length > 0.0 { 1.0 / length } else { 0.0 };
    for row in rows {
        let y = row as f32 + 0.5 - a.1;
        // A slice of the row, so that the loop is vectorised.
        let row = &mut distances[row * SIDE..][columns.clone()];
        for (column, distance) in columns.clone().zip(row) {
            let x = column as f32 + 0.5 - a.0;
            let along = ((x * dx + y * dy) * inverse).clamp(0.0, 1.0);
            let (ex, ey) = (x - along * dx, y - along * dy);
            let squared = ex * ex + ey * ey;
            // One instruction, where `min` has several for what is not a number.
            *distance = if squared < *distance { squared } else { *distance };
        }
    }
}

fn catmull_rom([p0, p1, p2, p3]: [Point; 4], t: f32) -> Point {
    let axis = |p0: f32, p1: f32, p2: f32, p3: f32| {
        let linear = p2 - p0;
        let square = 2.0 * p0 - 5.0 * p1 + 4.0 * p2 - p3;
        let cubic = 3.0 * (p1 - p2) + p3 - p0;
        p1 + 0.5 * t * (linear + t * (square + t * cubic))
    };
    (axis(p0.0, p1.0, p2.0, p3.0), axis(p0.1, p1.1, p2.1, p3.1))
}

/// Computes sine and cosine by Taylor series: the angles are below 0.3, and the platform's sine differs between
/// platforms.
fn small_sin_cos(angle: f32) -> (f32, f32) {
    let square = angle * angle;
    let sin = angle * (1.0 - square / 6.0 * (1.0 - square / 20.0));
    let cos = 1.0 - square / 2.0 * (1.0 - square / 12.0);
    (sin, cos)
}

fn mix(a: Point, b: Point, share: f32) -> Point {
    (a.0 + (b.0 - a.0) * share, a.1 + (b.1 - a.1) * share)
}

/// Rounds to the grey levels that a byte can hold, as in the scanned digits of MNIST.
fn quantised(ink: f32) -> f32 {
    // Truncates as `floor` does, which is a call where no instructions newer than SSE2 are used.
    f32::from((ink * 255.0 + 0.5) as u8) / 255.0
}

/// The randomness of one image.
struct Hand(ChaCha8Rng);

impl Hand {
    fn new(seed: u64, [purpose, split, index]: [u64; 3]) -> Self {
        let mut key = [0; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip([seed, purpose, split, index]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self(ChaCha8Rng::from_seed(key))
    }

    fn between(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.0.next_u32() >> 8) as f32 / (1 << 24) as f32;
        low + (high - low) * unit
    }

    fn below(&mut self, bound: u32) -> u32 {
        // A bias of 10 in 2^32 is negligible for a drawing.
        ((u64::from(self.0.next_u32()) * u64::from(bound)) >> 32) as u32
    }

    /// Returns noise around 0 within ±1 for each pixel: the sum of four bytes is nearly normally distributed.
    fn grain(&mut self) -> [f32; PIXELS] {
        let mut bytes = [[0; 4]; PIXELS];
        self.0.fill_bytes(bytes.as_flattened_mut());
        bytes.map(|[a, b, c, d]| {
            let sum = i32::from(a) + i32::from(b) + i32::from(c) + i32::from(d);
            (sum as f32 - 510.0) / 510.0
        })
    }
}

/// The purposes of random streams.
const ORDER: u64 = 0;
const PICTURE: u64 = 1;

/// Points of the warp's grid per side.
const GRID: usize = 4;

/// Largest displacement of a grid point, in box sizes.
const WARP: f32 = 0.09;

/// Fifteen degrees.
const MAX_TURN: f32 = 0.261_8;

/// Straight pieces per span of a curve; more would not be visible at this size.
const PIECES: usize = 4;

const BACKGROUND_GRAIN: f32 = 0.1;
const INK_GRAIN: f32 = 0.25;

#[cfg(test)]
mod tests;
