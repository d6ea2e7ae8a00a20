//! The exported functions, grouped as in CUDA's manual.

mod context;
mod copy;
mod device;
mod event;
mod graph;
mod memory;
mod module;
mod nvrtc;
mod pool;
mod stream;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_functions() {
        let modules = [
            context::NAMES,
            copy::NAMES,
            device::NAMES,
            event::NAMES,
            graph::NAMES,
            memory::NAMES,
            module::NAMES,
            nvrtc::NAMES,
            pool::NAMES,
            stream::NAMES,
        ];
        let mut names = modules.concat();
        names.sort_unstable();
        assert_eq!(names, crate::functions::EXPORTED);
    }
}
