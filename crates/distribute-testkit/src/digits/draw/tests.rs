use super::*;

/// FNV-1a over the grey levels and labels.
fn fingerprint(split: &Split) -> u64 {
    let greys = split.images.iter().map(|pixel| (pixel * 255.0).round() as u64);
    let labels = split.labels.iter().map(|label| u64::from(*label));
    greys.chain(labels).fold(0xcbf2_9ce4_8422_2325, |hash, value| (hash ^ value).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn the_same_seed_draws_the_same_digits_everywhere() {
    let fingerprints = [(42, TRAIN), (42, TEST), (43, TRAIN)].map(|(seed, part)| fingerprint(&split(seed, part, 200)));
    assert_eq!(
        fingerprints,
        [0xf880_a6f9_fc49_b39f, 0xdea3_09a6_f1cf_0067, 0x49f7_2535_7b58_9f90],
        "{fingerprints:#x?}"
    );
}

#[test]
fn an_image_does_not_depend_on_how_many_are_drawn() {
    let (few, many) = (split(7, TRAIN, 13), split(7, TRAIN, 40));
    assert_eq!(few.labels, many.labels[..13]);
    assert_eq!(few.images, many.images[..13 * PIXELS]);
}

#[test]
fn no_two_images_are_alike() {
    let split = split(7, TRAIN, 1000);
    let images: Vec<Vec<u32>> =
        split.images.chunks(PIXELS).map(|image| image.iter().map(|p| p.to_bits()).collect()).collect();
    let distinct: std::collections::HashSet<_> = images.iter().collect();
    assert_eq!(distinct.len(), 1000);
}

#[test]
fn every_block_of_ten_holds_every_digit_and_any_shard_is_balanced() {
    let split = split(3, TRAIN, 10_000);
    for block in split.labels.chunks(CLASSES) {
        let mut block = block.to_vec();
        block.sort_unstable();
        assert_eq!(block, (0..10).collect::<Vec<u32>>());
    }
    for shards in [2, 4, 5, 10] {
        for digit in 0..10 {
            let own = split.labels.iter().step_by(shards).filter(|label| **label == digit).count();
            let fair = 1000 / shards;
            assert!(own.abs_diff(fair) < fair / 2, "{own} of digit {digit} in one of {shards} shards");
        }
    }
}

#[test]
fn pixels_are_grey_levels_with_ink_on_paper() {
    let split = split(5, TEST, 500);
    assert!(split.images.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
    for image in split.images.chunks(PIXELS) {
        let dark = image.iter().filter(|pixel| **pixel > 0.5).count();
        assert!((20..300).contains(&dark), "{dark} dark pixels");
        let border = image[..SIDE].iter().chain(&image[PIXELS - SIDE..]);
        assert!(border.filter(|pixel| **pixel > 0.5).count() < 12, "the digit runs off the paper");
    }
}

#[test]
fn the_series_agree_with_the_library() {
    for step in -100..=100_i8 {
        let angle = MAX_TURN * f32::from(step) / 100.0;
        let (sin, cos) = small_sin_cos(angle);
        assert!((sin - angle.sin()).abs() < 1e-6 && (cos - angle.cos()).abs() < 1e-6);
    }
}

#[test]
fn every_style_of_every_digit_stays_in_its_box() {
    for digit in 0..10 {
        for glyph in glyphs::styles(digit) {
            for Stroke { points, .. } in *glyph {
                assert!(points.len() >= 2, "digit {digit}");
                let inside = |at: f32| (0.0..=1.0).contains(&at);
                assert!(points.iter().all(|(x, y)| inside(*x) && inside(*y)), "digit {digit}");
            }
        }
    }
}
