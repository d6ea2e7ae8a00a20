//! Modules, functions and launches.

use std::fs;
use std::ptr;
use std::sync::Arc;

use crate::context::current;
use crate::device::{MAX_BLOCK, MAX_GRID, MAX_THREADS_PER_BLOCK};
use crate::error::{Code, Result};
use crate::ffi::{Address, Array, Out, Text, exports};
use crate::module::{FUNCTIONS, Function, Launch, MODULES, Module};
use crate::nvrtc::object_of;
use crate::stream::stream;
use crate::work::Work;

exports! {
    fn cuModuleLoad(loaded: Out<usize>, path: Text) {
        let path = path.get().and_then(|path| path.to_str().ok()).ok_or(Code::INVALID_VALUE)?;
        let image = fs::read(path).map_err(|_| Code::FILE_NOT_FOUND)?;
        // Appends a zero byte, so that an empty file has a byte to read.
        let image = [&image[..], &[0]].concat();
        load(&loaded, image.as_ptr().expose_provenance())
    }

    fn cuModuleLoadData(loaded: Out<usize>, image: Address) {
        load(&loaded, image)
    }

    fn cuModuleLoadDataEx(loaded: Out<usize>, image: Address, _count: u32, _options: Address, _values: Address) {
        load(&loaded, image)
    }

    fn cuModuleUnload(handle: usize) {
        current()?;
        MODULES.remove(handle).ok_or(Code::INVALID_HANDLE)?.unload();
        Ok(())
    }

    fn cuModuleGetFunction(found: Out<usize>, module: usize, name: Text) {
        let module = MODULES.get(module).ok_or(Code::INVALID_HANDLE)?;
        found.set(module.function(name.get().ok_or(Code::INVALID_VALUE)?)?)
    }

    fn cuModuleGetGlobal_v2(_address: Out<u64>, _bytes: Out<usize>, _module: usize, _name: Text) {
        Err(Code::NOT_FOUND)
    }

    fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, handle: usize) {
        let function = function(handle)?;
        let arch = current()?.device().arch;
        value.set(match attribute {
            0 => function.max_threads as i32,
            4 => 32, // registers of a thread
            5 | 6 => (arch.major * 10 + arch.minor) as i32,
            8 => MAX_SHARED_BYTES as i32,
            1..=15 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(handle: usize, attribute: u32, _value: i32) {
        function(handle)?;
        if matches!(attribute, 8 | 9) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuFuncSetCacheConfig(handle: usize, _config: u32) {
        function(handle).map(drop)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<i32>, handle: usize, threads: i32, _shared: usize) {
        active_blocks(&blocks, handle, threads)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, handle: usize, threads: i32, _shared: usize, _flags: u32,
    ) {
        active_blocks(&blocks, handle, threads)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, handle: usize, _shared_of_block: Address, _shared: usize, limit: i32,
    ) {
        potential_block(&grid, &block, handle, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, handle: usize, _shared_of_block: Address, _shared: usize, limit: i32,
        _flags: u32,
    ) {
        potential_block(&grid, &block, handle, limit)
    }

    fn cuLaunchKernel(
        handle: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32,
        on: usize, params: Array<Address>, extra: Address,
    ) {
        current()?;
        let function = function(handle)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let stream = stream(on)?;
        if stream.context.handle != function.context {
            return Err(Code::INVALID_HANDLE);
        }
        check_dimensions(&function, grid, block)?;
        if extra != 0 || shared > MAX_SHARED_BYTES {
            return Err(Code::INVALID_VALUE);
        }
        let source = params.items(1)?[0];
        if source == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: C callers promise the kernel's parameter there.
        let params = unsafe { function.copy_params(ptr::with_exposed_provenance(source)) };
        stream.enqueue(Work::Launch(Arc::new(Launch { function, grid, block, params })))
    }
}

fn load(loaded: &Out<usize>, image: Address) -> Result {
    let context = current()?;
    if loaded.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let object = object_of(image, context.device())?;
    loaded.set(Module::load(&context, &object)?.handle)
}

fn function(handle: usize) -> Result<Arc<Function>> {
    FUNCTIONS.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn check_dimensions(function: &Function, grid: [u32; 3], block: [u32; 3]) -> Result {
    let within = |dims: [u32; 3], most: [u32; 3]| dims.iter().zip(most).all(|(&dim, most)| (1..=most).contains(&dim));
    let threads: u64 = block.iter().map(|&dim| u64::from(dim)).product();
    let most = u64::from(function.max_threads.min(MAX_THREADS_PER_BLOCK));
    if within(grid, MAX_GRID) && within(block, MAX_BLOCK) && threads <= most {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

fn active_blocks(blocks: &Out<i32>, handle: usize, threads: i32) -> Result {
    function(handle)?;
    if threads <= 0 {
        return Err(Code::INVALID_VALUE);
    }
    blocks.set((THREADS_PER_MULTIPROCESSOR / threads).min(BLOCKS_PER_MULTIPROCESSOR))
}

fn potential_block(grid: &Out<i32>, block: &Out<i32>, handle: usize, limit: i32) -> Result {
    let threads = function(handle)?.max_threads as i32;
    let threads = if limit > 0 { threads.min(limit) } else { threads };
    block.set(threads)?;
    grid.set((THREADS_PER_MULTIPROCESSOR / threads).min(BLOCKS_PER_MULTIPROCESSOR) * current()?.device().attribute(16)?)
}

const MAX_SHARED_BYTES: u32 = 48 << 10;
const THREADS_PER_MULTIPROCESSOR: i32 = 2048;
const BLOCKS_PER_MULTIPROCESSOR: i32 = 32;
