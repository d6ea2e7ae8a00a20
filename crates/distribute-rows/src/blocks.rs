//! Blocks of results.

#![expect(unsafe_code, reason = "memory that is written for the first time")]

use std::mem::MaybeUninit;

use rayon::prelude::*;

use crate::Float;

/// How results are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The number of results.
    pub count: usize,
    /// The results of a block; the last one may have fewer.
    pub size: usize,
    /// The number of elements whose copying takes about as long as a block's computing. Threads get blocks of 16 Ki
    /// or more together.
    pub cost: usize,
}

impl Blocks {
    /// Returns the results that `f` writes, and what it returns for each block.
    ///
    /// `f` gets what `state` returns, which it has for several blocks one after another, the number of a block, and
    /// room for its results, in which it writes each element. The room is in a cache and copied from there, so that
    /// memory is written once, and not cleared before.
    ///
    /// # Panics
    /// If blocks are empty and there are results.
    ///
    /// # Examples
    /// ```
    /// use distribute_rows::Blocks;
    ///
    /// let blocks = Blocks { count: 5, size: 2, cost: 2 };
    /// let (results, lengths) = blocks.computed(
    ///     || (),
    ///     |(), block, room: &mut [f32]| {
    ///         room.fill(block as f32);
    ///         room.len()
    ///     },
    /// );
    /// assert_eq!(results, [0.0, 0.0, 1.0, 1.0, 2.0]);
    /// assert_eq!(lengths, [2, 2, 1]);
    /// ```
    pub fn computed<T: Float, S, R: Send>(
        self,
        state: impl Fn() -> S + Sync,
        f: impl Fn(&mut S, usize, &mut [T]) -> R + Sync,
    ) -> (Vec<T>, Vec<R>) {
        // Compiled once for the types, and not for each function.
        self.computed_by(&state, &f)
    }

    fn computed_by<T: Float, S, R: Send>(
        self,
        state: &(dyn Fn() -> S + Sync),
        f: &(dyn Fn(&mut S, usize, &mut [T]) -> R + Sync),
    ) -> (Vec<T>, Vec<R>) {
        let Blocks { count, size, cost } = self;
        if count == 0 {
            return (Vec::new(), Vec::new());
        }
        let mut returned: Vec<Option<R>> = (0..count.div_ceil(size)).map(|_| None).collect();
        let least = LEAST.div_ceil(cost.max(1));
        let out = if size > LARGEST {
            let mut out = zeros(count);
            let all = Run { first: 0, size, out: &mut out[..], returned: &mut returned };
            all.divided(least, &|run: Run<'_, T, R>| {
                let mut state = state();
                run.each(|at, out| f(&mut state, at, out));
            });
            out
        } else {
            let mut out = Vec::with_capacity(count);
            let all = Run { first: 0, size, out: &mut out.spare_capacity_mut()[..count], returned: &mut returned };
            all.divided(least, &|run: Run<'_, MaybeUninit<T>, R>| {
                let (mut state, mut room) = (state(), Room::new(size.min(run.out.len())));
                run.each(|at, out| {
                    let room = room.of(out.len());
                    let returned = f(&mut state, at, room);
                    out.write_copy_of_slice(room);
                    returned
                });
            });
            // SAFETY: the first `count` elements, which are inside the capacity, have been written: each is in one of
            // the blocks, and all blocks have been copied, since nothing has panicked.
            unsafe { out.set_len(count) };
            out
        };
        (out, returned.into_iter().flatten().collect())
    }

    /// Returns the results that `f` writes.
    ///
    /// # Examples
    /// ```
    /// use distribute_rows::Blocks;
    ///
    /// let squares = |block: usize, room: &mut [f32]| room[0] = (block * block) as f32;
    /// assert_eq!(Blocks { count: 3, size: 1, cost: 1 }.results(squares), [0.0, 1.0, 4.0]);
    /// ```
    pub fn results<T: Float>(self, f: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
        self.computed(|| (), |(), at, room| f(at, room)).0
    }
}

/// Blocks one after another.
struct Run<'a, E, R> {
    /// The number of the first block.
    first: usize,
    /// The results of a block.
    size: usize,
    out: &'a mut [E],
    /// Each block's returned value.
    returned: &'a mut [Option<R>],
}

impl<E: Send, R: Send> Run<'_, E, R> {
    /// Calls `f` with parts of `least` blocks or more, on all threads of the pool that the caller belongs to.
    fn divided(self, least: usize, f: &(dyn Fn(Run<'_, E, R>) + Sync)) {
        let threads = rayon::current_num_threads();
        // A pool of one thread would only be waited for.
        let least = if threads > 1 { least.max(self.returned.len() / (PARTS * threads)) } else { self.returned.len() };
        self.divided_to(least, f);
    }

    fn divided_to(self, least: usize, f: &(dyn Fn(Run<'_, E, R>) + Sync)) {
        if self.returned.len() / 2 < least {
            return f(self);
        }
        let Run { first, size, out, returned } = self;
        let middle = returned.len() / 2;
        let (out, other_out) = out.split_at_mut(middle * size);
        let (returned, other_returned) = returned.split_at_mut(middle);
        let one = Run { first, size, out, returned };
        let other = Run { first: first + middle, size, out: other_out, returned: other_returned };
        rayon::join(|| one.divided_to(least, f), || other.divided_to(least, f));
    }

    /// Calls `f` with each block's number and room.
    fn each(self, mut f: impl FnMut(usize, &mut [E]) -> R) {
        for (at, (out, returned)) in self.out.chunks_mut(self.size).zip(self.returned).enumerate() {
            *returned = Some(f(self.first + at, out));
        }
    }
}

/// Room for a block's results.
struct Room<T>(Vec<T>);

impl<T: Float> Room<T> {
    fn new(size: usize) -> Room<T> {
        Room(vec![T::default(); size])
    }

    /// Returns room for some elements. Where assertions are checked, an element that is not written will be NaN.
    fn of(&mut self, count: usize) -> &mut [T] {
        let room = &mut self.0[..count];
        if cfg!(debug_assertions) {
            room.fill(T::from_f64(f64::NAN));
        }
        room
    }
}

/// Returns zeros, which the threads of the pool write: new memory costs most where it is first written.
fn zeros<T: Float>(count: usize) -> Vec<T> {
    /// The number of elements that are worth a thread.
    const SHARE: usize = 1 << 16;
    if count <= SHARE || rayon::current_num_threads() == 1 {
        return vec![T::default(); count];
    }
    rayon::iter::repeat_n(T::default(), count).with_min_len(SHARE).collect()
}

/// The number of elements below which a thread would cost more than it saves.
const LEAST: usize = 16 * 1024;

/// The parts of a division for each thread, so that one that is held up is helped by others.
const PARTS: usize = 8;

/// The elements of the largest block that is computed in a cache.
const LARGEST: usize = 256 * 1024;
