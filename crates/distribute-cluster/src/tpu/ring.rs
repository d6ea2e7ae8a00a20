//! Orders of a mesh in which neighbours follow each other.

/// Returns all places of a mesh in an order in which each is next to the one before it. The last one is next to the
/// first if the mesh has an even number of places and at least two dimensions of two or more.
pub(super) fn ring(shape: [u32; 3]) -> Vec<[u32; 3]> {
    let [x, y, z] = shape;
    // The plane of y and z as a line of neighbours, which makes a plane of the whole with x.
    let line = snake(y, z);
    if x == 1 {
        return plane(y, z).into_iter().map(|(y, z)| [0, y, z]).collect();
    }
    plane(x, line.len() as u32)
        .into_iter()
        .map(|(x, at)| {
            let (y, z) = line[at as usize];
            [x, y, z]
        })
        .collect()
}

/// Returns a closed order of a plane, or an open one if there is no closed one.
fn plane(rows: u32, columns: u32) -> Vec<(u32, u32)> {
    if rows < 2 || columns < 2 || !(rows * columns).is_multiple_of(2) {
        return snake(rows, columns);
    }
    if !columns.is_multiple_of(2) {
        return plane(columns, rows).into_iter().map(|(column, row)| (row, column)).collect();
    }
    // Down and up the columns below the first row, which leads back.
    let there = (0..columns).flat_map(|column| {
        let rows = 1..rows;
        let rows: Box<dyn Iterator<Item = u32>> =
            if column.is_multiple_of(2) { Box::new(rows) } else { Box::new(rows.rev()) };
        rows.map(move |row| (row, column))
    });
    let back = (1..columns).rev().map(|column| (0, column));
    std::iter::once((0, 0)).chain(there).chain(back).collect()
}

/// Returns the rows of a plane one after another, each second one backwards.
fn snake(rows: u32, columns: u32) -> Vec<(u32, u32)> {
    let cell = |row: u32, at: u32| (row, if row.is_multiple_of(2) { at } else { columns - 1 - at });
    (0..rows).flat_map(|row| (0..columns).map(move |at| cell(row, at))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn distance(a: [u32; 3], b: [u32; 3]) -> u32 {
        a.iter().zip(b).map(|(a, b)| a.abs_diff(b)).sum()
    }

    proptest! {
        #[test]
        fn neighbours_follow_each_other(shape in prop::array::uniform3(1u32..7)) {
            let order = ring(shape);
            let places: u32 = shape.iter().product();
            prop_assert_eq!(order.iter().collect::<BTreeSet<_>>().len() as u32, places);
            prop_assert_eq!(order.len() as u32, places);
            prop_assert!(order.iter().all(|at| at.iter().zip(shape).all(|(at, size)| *at < size)));
            prop_assert!(order.windows(2).all(|pair| distance(pair[0], pair[1]) == 1), "{order:?}");
            if places.is_multiple_of(2) && shape.iter().filter(|size| **size > 1).count() > 1 {
                prop_assert_eq!(distance(order[0], order[order.len() - 1]), 1);
            }
            prop_assert_eq!(order[0], [0, 0, 0]);
        }
    }
}
