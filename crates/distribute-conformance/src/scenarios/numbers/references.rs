//! References in f64: the formulas of the papers, element by element.

use distribute::backend::TensorLibrary;
use distribute::optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Ftrl, Lamb, Nadam, Optimizer, RmsProp, Sgd, Trainable,
};

/// Optimizers, with settings that expose rounding errors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Sgd,
    Momentum,
    Nesterov,
    Adam,
    /// beta2 so near 1 that 1 − beta2 has hardly a digit in f32.
    SlowAdam,
    AdamW,
    Adagrad,
    RmsProp,
    CenteredRmsProp,
    Lamb,
    Adadelta,
    Adamax,
    Nadam,
    Ftrl,
}

const RATE: f64 = 0.01;

impl Kind {
    pub(super) const ALL: [Kind; 14] = [
        Kind::Sgd,
        Kind::Momentum,
        Kind::Nesterov,
        Kind::Adam,
        Kind::SlowAdam,
        Kind::AdamW,
        Kind::Adagrad,
        Kind::RmsProp,
        Kind::CenteredRmsProp,
        Kind::Lamb,
        Kind::Adadelta,
        Kind::Adamax,
        Kind::Nadam,
        Kind::Ftrl,
    ];

    pub(super) fn build<M: Trainable>(
        self,
        model: &M,
    ) -> Result<Optimizer<M::Library>, <M::Library as TensorLibrary>::Error> {
        match self {
            Kind::Sgd => Sgd::new(RATE).build(model),
            Kind::Momentum => Sgd::new(RATE).momentum(0.9).build(model),
            Kind::Nesterov => Sgd::new(RATE).momentum(0.9).nesterov().build(model),
            Kind::Adam => Adam::new(RATE).build(model),
            Kind::SlowAdam => Adam::new(RATE).betas(0.9, 0.999_999_9).build(model),
            Kind::AdamW => AdamW::new(RATE, 0.1).build(model),
            Kind::Adagrad => Adagrad::new(RATE).build(model),
            Kind::RmsProp => RmsProp::new(RATE).rho(0.99).momentum(0.5).build(model),
            Kind::CenteredRmsProp => RmsProp::new(RATE).rho(0.9).centered().build(model),
            Kind::Lamb => Lamb::new(RATE).build(model),
            Kind::Adadelta => Adadelta::new(1.0).epsilon(1e-4).build(model),
            Kind::Adamax => Adamax::new(RATE).build(model),
            Kind::Nadam => Nadam::new(RATE).build(model),
            Kind::Ftrl => Ftrl::new(RATE).regularization(0.01, 0.1).l2_shrinkage(0.1).beta(1.0).build(model),
        }
    }
}

/// One variable and its optimizer state.
pub(super) struct Reference {
    kind: Kind,
    pub(super) parameter: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    steps: i32,
}

impl Reference {
    pub(super) fn new(kind: Kind, parameter: Vec<f64>) -> Reference {
        let zeros = vec![0.0; parameter.len()];
        let sums = matches!(kind, Kind::Adagrad | Kind::Ftrl);
        let second = if sums { vec![0.1; parameter.len()] } else { zeros.clone() };
        Reference { kind, parameter, first: zeros, second, steps: 0 }
    }

    /// Makes a step of this variable, whose steps are counted separately.
    pub(super) fn step(&mut self, gradient: &[f64]) {
        self.steps += 1;
        let n = self.steps;
        let Reference { kind, parameter, first, second, .. } = self;
        let elements = parameter.iter_mut().zip(gradient).zip(first.iter_mut()).zip(second.iter_mut());
        let moments = |g: f64, m: &mut f64, v: &mut f64, beta2: f64| {
            *m = 0.9 * *m + (1.0 - 0.9) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            (*m / (1.0 - 0.9f64.powi(n)), *v / (1.0 - beta2.powi(n)))
        };
        match *kind {
            Kind::Sgd => elements.for_each(|(((p, g), _), _)| *p -= RATE * g),
            Kind::Momentum => elements.for_each(|(((p, g), velocity), _)| {
                *velocity = 0.9 * *velocity - RATE * g;
                *p += *velocity;
            }),
            Kind::Nesterov => elements.for_each(|(((p, g), velocity), _)| {
                *velocity = 0.9 * *velocity - RATE * g;
                *p += 0.9 * *velocity - RATE * g;
            }),
            Kind::Adam | Kind::SlowAdam | Kind::AdamW => {
                let beta2 = if *kind == Kind::SlowAdam { 0.999_999_9 } else { 0.999 };
                let decay = if *kind == Kind::AdamW { 0.1 } else { 0.0 };
                elements.for_each(|(((p, g), m), v)| {
                    let (m, v) = moments(*g, m, v, beta2);
                    *p -= RATE * decay * *p + RATE * m / (v.sqrt() + 1e-8);
                });
            }
            Kind::Adagrad => elements.for_each(|(((p, g), _), sum)| {
                *sum += g * g;
                *p -= RATE * g / (*sum + 1e-7).sqrt();
            }),
            Kind::RmsProp => elements.for_each(|(((p, g), sum), v)| {
                *v = 0.99 * *v + (1.0 - 0.99) * g * g;
                *sum = 0.5 * *sum + RATE * g / (*v + 1e-7).sqrt();
                *p -= *sum;
            }),
            Kind::CenteredRmsProp => elements.for_each(|(((p, g), mean), v)| {
                *v = 0.9 * *v + (1.0 - 0.9) * g * g;
                *mean = 0.9 * *mean + (1.0 - 0.9) * g;
                *p -= RATE * g / ((*v - *mean * *mean).max(0.0) + 1e-7).sqrt();
            }),
            Kind::Lamb => {
                let direction: Vec<f64> = elements
                    .map(|(((p, g), m), v)| {
                        let (m, v) = moments(*g, m, v, 0.999);
                        m / (v.sqrt() + 1e-6) + 0.01 * *p
                    })
                    .collect();
                let norm = |of: &[f64]| of.iter().map(|x| x * x).sum::<f64>().sqrt();
                let ratio = norm(parameter) / norm(&direction);
                parameter.iter_mut().zip(direction).for_each(|(p, d)| *p -= RATE * ratio * d);
            }
            Kind::Adadelta => elements.for_each(|(((p, g), changes), v)| {
                *v = 0.95 * *v + (1.0 - 0.95) * g * g;
                let change = ((*changes + 1e-4) / (*v + 1e-4)).sqrt() * g;
                *changes = 0.95 * *changes + (1.0 - 0.95) * change * change;
                *p -= change;
            }),
            Kind::Adamax => elements.for_each(|(((p, g), m), u)| {
                *m = 0.9 * *m + (1.0 - 0.9) * g;
                *u = (0.999 * *u).max(g.abs());
                *p -= RATE * *m / ((1.0 - 0.9f64.powi(n)) * (*u + 1e-7));
            }),
            Kind::Nadam => {
                let momentum = |n: i32| 0.9 * (1.0 - 0.5 * 0.96f64.powi(n));
                let so_far: f64 = (1..=n).map(momentum).product();
                elements.for_each(|(((p, g), m), v)| {
                    *m = 0.9 * *m + (1.0 - 0.9) * g;
                    *v = 0.999 * *v + (1.0 - 0.999) * g * g;
                    let ahead = momentum(n + 1) * *m / (1.0 - so_far * momentum(n + 1));
                    let mean = ahead + (1.0 - momentum(n)) * g / (1.0 - so_far);
                    *p -= RATE * mean / ((*v / (1.0 - 0.999f64.powi(n))).sqrt() + 1e-7);
                });
            }
            Kind::Ftrl => elements.for_each(|(((p, g), z), sum)| {
                let before = sum.sqrt();
                *sum += g * g;
                *z += g + 2.0 * 0.1 * *p - (sum.sqrt() - before) / RATE * *p;
                *p = (z.clamp(-0.01, 0.01) - *z) / ((1.0 + sum.sqrt()) / RATE + 2.0 * 0.1);
            }),
        }
    }
}

/// The result of batch normalisation in training.
pub(super) struct Normalised {
    pub(super) outputs: Vec<f64>,
    /// Gradients of the inputs, for the sum of outputs times slopes.
    pub(super) gradients: Vec<f64>,
    pub(super) means: Vec<f64>,
    /// Variances of the population.
    pub(super) variances: Vec<f64>,
}

/// Normalises (rows, channels, 2), or one channel of any length.
pub(super) fn normalised(x: &[f64], slopes: &[f64], channels: usize, epsilon: f64, remove_mean: bool) -> Normalised {
    let inner = if channels == 1 { 1 } else { 2 };
    let (mut outputs, mut gradients) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    let (mut means, mut variances) = (Vec::new(), Vec::new());
    for channel in 0..channels {
        let of_channel: Vec<usize> = (0..x.len()).filter(|at| at / inner % channels == channel).collect();
        let n = of_channel.len() as f64;
        // Relative to the first element, so that f64 has all its digits for the differences.
        let origin = x[of_channel[0]];
        let mean = of_channel.iter().map(|at| x[*at] - origin).sum::<f64>() / n;
        let centred = |at: usize| x[at] - origin - mean;
        let variance = of_channel.iter().map(|at| centred(*at).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (variance + epsilon).sqrt();
        let taken = if remove_mean { 0.0 } else { origin + mean };
        let sum: f64 = of_channel.iter().map(|at| slopes[*at]).sum();
        let product: f64 = of_channel.iter().map(|at| slopes[*at] * (centred(*at) + taken)).sum();
        for at in of_channel {
            outputs[at] = (centred(at) + taken) * scale;
            let by_mean = if remove_mean { sum / n } else { 0.0 };
            gradients[at] = scale * (slopes[at] - by_mean) - scale.powi(3) * product * centred(at) / n;
        }
        means.push(origin + mean);
        variances.push(variance * n / (n - 1.0));
    }
    Normalised { outputs, gradients, means, variances }
}

/// Computes the loss of one row of logits, and its gradient.
pub(super) fn cross_entropy(logits: &[f64], class: usize) -> (f64, Vec<f64>) {
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - highest).exp()).sum();
    let share = |at: usize| (logits[at] - highest).exp() / sum - f64::from(u8::from(at == class));
    (sum.ln() - (logits[class] - highest), (0..logits.len()).map(share).collect())
}

pub(super) fn binary_cross_entropy(x: f64, target: f64) -> (f64, f64) {
    let share = if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) };
    (x.max(0.0) - x * target + (-x.abs()).exp().ln_1p(), share - target)
}

pub(super) fn huber(x: f64, target: f64, delta: f64) -> (f64, f64) {
    let difference = x - target;
    match difference.abs() <= delta {
        true => (difference * difference / 2.0, difference),
        false => (delta * (difference.abs() - delta / 2.0), delta * difference.signum()),
    }
}
