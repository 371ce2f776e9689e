//! A list that stays on the stack while it is short. Requests have one or two entries; moving room for thirty around
//! cost more than everything else in a small operation.

/// Up to `N` entries inline, more on the heap.
#[derive(Clone, Debug)]
pub struct List<T, const N: usize> {
    n: usize,
    few: [T; N],
    many: Vec<T>,
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        Self { n: 0, few: [T::default(); N], many: Vec::new() }
    }
}

impl<T: Copy + Default, const N: usize> List<T, N> {
    /// Appends an entry.
    #[inline]
    pub fn push(&mut self, item: T) {
        if let Some(slot) = self.few.get_mut(self.n) {
            *slot = item;
        } else {
            self.spill(item);
        }
        self.n += 1;
    }

    #[cold]
    fn spill(&mut self, item: T) {
        if self.n == N {
            self.many.clear();
            self.many.extend_from_slice(&self.few);
        }
        self.many.push(item);
    }

    /// The entries.
    #[inline]
    pub fn as_slice(&self) -> &[T] {
        if self.n <= N { &self.few[..self.n] } else { &self.many }
    }

    /// The entries.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        if self.n <= N { &mut self.few[..self.n] } else { &mut self.many }
    }

    /// Keeps the first `n` entries.
    pub fn truncate(&mut self, n: usize) {
        if n >= self.n {
            return;
        }
        if self.n > N && n <= N {
            self.few[..n].copy_from_slice(&self.many[..n]);
            self.many.clear();
        } else {
            self.many.truncate(n);
        }
        self.n = n;
    }
}

impl<T: Copy + Default, const N: usize> FromIterator<T> for List<T, N> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut list = Self::default();
        items.into_iter().for_each(|item| list.push(item));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_like_a_vector_across_the_inline_limit() {
        for total in 0..9 {
            for keep in 0..9 {
                let mut list: List<usize, 4> = (0..total).collect();
                let mut model: Vec<usize> = (0..total).collect();
                assert_eq!(list.as_slice(), model);
                list.truncate(keep);
                model.truncate(keep);
                for extra in 90..96 {
                    list.push(extra);
                    model.push(extra);
                    assert_eq!(list.as_slice(), model);
                    assert_eq!(list.as_mut_slice(), model);
                    list = list.clone();
                }
            }
        }
    }
}
