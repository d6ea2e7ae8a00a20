//! Blocks of results.

#![expect(unsafe_code, reason = "memory that is written for the first time")]

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
        state: impl Fn() -> S + Sync + Send,
        f: impl Fn(&mut S, usize, &mut [T]) -> R + Sync + Send,
    ) -> (Vec<T>, Vec<R>) {
        let Blocks { count, size, cost } = self;
        if count == 0 {
            return (Vec::new(), Vec::new());
        }
        let together = LEAST.div_ceil(cost.max(1));
        if size > LARGEST {
            let mut out = zeros(count);
            let blocks = out.par_chunks_mut(size).enumerate().with_min_len(together);
            let returned = blocks.map_init(state, |state, (at, room)| f(state, at, room)).collect();
            return (out, returned);
        }
        let mut out = Vec::with_capacity(count);
        // A pool of one thread would only be waited for.
        if count <= size || rayon::current_num_threads() == 1 {
            let (mut state, mut room) = (state(), Room::new(size.min(count)));
            let mut returned = Vec::with_capacity(count.div_ceil(size));
            for at in 0..count.div_ceil(size) {
                let room = room.of(size.min(count - at * size));
                returned.push(f(&mut state, at, room));
                out.extend_from_slice(room);
            }
            return (out, returned);
        }
        let blocks = out.spare_capacity_mut()[..count].par_chunks_mut(size).enumerate().with_min_len(together);
        let returned = blocks.map_init(
            || (state(), Room::new(size)),
            |(state, room), (at, out)| {
                let room = room.of(out.len());
                let returned = f(state, at, room);
                out.write_copy_of_slice(room);
                returned
            },
        );
        let returned = returned.collect();
        // SAFETY: the first `count` elements, which are inside the capacity, have been written: each is in one of the
        // blocks, and all blocks have been copied, since nothing has panicked.
        unsafe { out.set_len(count) };
        (out, returned)
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
    pub fn results<T: Float>(self, f: impl Fn(usize, &mut [T]) + Sync + Send) -> Vec<T> {
        self.computed(|| (), |(), at, room| f(at, room)).0
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

/// The elements of the largest block that is computed in a cache.
const LARGEST: usize = 256 * 1024;
