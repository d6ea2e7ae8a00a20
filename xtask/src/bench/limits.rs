//! The limits of the machine: bounds that results are held against.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::Instant;

use super::spread::spread;
use crate::error::text;

/// Seconds that threads need to read and write `ranks` f32 buffers of `bytes` each, summed into all of them, when each
/// thread takes a fixed share and nothing has to be agreed: the limit of an all-reduce in memory.
pub(crate) fn memory_all_reduce(ranks: usize, bytes: usize, repetitions: usize) -> f64 {
    let count = bytes / 4;
    let mut buffers: Vec<Vec<f32>> = (0..ranks).map(|rank| vec![rank as f32; count]).collect();
    let threads = ranks.min(std::thread::available_parallelism().map_or(1, usize::from)).max(1);
    let share = count.div_ceil(threads).max(1);
    let mut seconds = Vec::new();
    for _ in 0..repetitions.max(3) {
        let barrier = Barrier::new(threads + 1);
        let mut shares: Vec<Vec<&mut [f32]>> = (0..threads).map(|_| Vec::new()).collect();
        for buffer in &mut buffers {
            let mut chunks = buffer.chunks_mut(share);
            shares.iter_mut().for_each(|share| share.extend(chunks.next()));
        }
        let elapsed = std::thread::scope(|scope| {
            for mut share in shares {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    sum_into_all(&mut share);
                    barrier.wait();
                });
            }
            barrier.wait();
            let started = Instant::now();
            barrier.wait();
            started.elapsed()
        });
        seconds.push(elapsed.as_secs_f64());
    }
    std::hint::black_box(&buffers);
    spread(seconds).0
}

fn sum_into_all(buffers: &mut [&mut [f32]]) {
    if let [a, b] = buffers {
        for (x, y) in a.iter_mut().zip(b.iter_mut()) {
            let sum = *x + *y;
            *x = sum;
            *y = sum;
        }
        return;
    }
    let len = buffers.first().map_or(0, |buffer| buffer.len());
    let mut sums = [0f32; 1024];
    for start in (0..len).step_by(sums.len()) {
        let sums = &mut sums[..1024.min(len - start)];
        sums.fill(0.0);
        for buffer in buffers.iter() {
            sums.iter_mut().zip(&buffer[start..]).for_each(|(sum, x)| *sum += x);
        }
        for buffer in buffers.iter_mut() {
            buffer[start..start + sums.len()].copy_from_slice(sums);
        }
    }
}

/// Bytes per second of one TCP connection over loopback in each direction, both at once, with large writes.
pub(crate) fn loopback_both_ways() -> Result<f64, String> {
    const TOTAL: usize = 1 << 30;
    let listener = TcpListener::bind("127.0.0.1:0").map_err(text)?;
    let client = TcpStream::connect(listener.local_addr().map_err(text)?).map_err(text)?;
    let (server, _) = listener.accept().map_err(text)?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for stream in [&client, &server] {
            handles.push(scope.spawn(move || pump(stream, TOTAL / 2)));
            handles.push(scope.spawn(move || drain(stream, TOTAL / 2)));
        }
        handles.into_iter().try_for_each(|handle| match handle.join() {
            Ok(outcome) => outcome.map_err(text),
            Err(_) => Err("a thread of the loopback measurement panicked".to_owned()),
        })
    })?;
    Ok((TOTAL / 2) as f64 / started.elapsed().as_secs_f64())
}

fn pump(mut stream: &TcpStream, total: usize) -> std::io::Result<()> {
    let block = vec![1u8; 1 << 20];
    (0..total / block.len()).try_for_each(|_| stream.write_all(&block))
}

fn drain(mut stream: &TcpStream, total: usize) -> std::io::Result<()> {
    let mut block = vec![0u8; 1 << 20];
    let mut left = total;
    while left > 0 {
        match stream.read(&mut block)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            read => left -= read,
        }
    }
    Ok(())
}
