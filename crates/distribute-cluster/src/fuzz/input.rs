//! Inputs of several fields.

/// The rest of an input.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// Takes a byte; 0 at the end.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Takes a piece, whose length is one byte before it; all that is left if that is less.
    pub(crate) fn piece(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let len = usize::from(self.byte()).min(self.0.len());
        let (piece, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(piece)
    }
}

impl<'a> Iterator for Input<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.piece()
    }
}
