//! Frames on a byte stream: a length (`u32`, little endian) and that many bytes.

use std::io;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::WireError;

/// How much is read ahead of what has arrived: a claimed length alone reserves no more than this.
const CHUNK: usize = 64 << 10;

/// Reads one frame of at most `limit` bytes.
///
/// # Errors
/// `InvalidData` for a longer frame, `UnexpectedEof` for one that ends early, else what the stream says.
pub async fn read_frame<S: AsyncRead + Unpin>(stream: &mut S, limit: usize) -> io::Result<Vec<u8>> {
    let length = read_length(stream, limit).await?;
    read_body(stream, length).await
}

/// Reads the length of a frame; [`read_body`] must follow. Between the two the reader may wait until it has room.
///
/// # Errors
/// As [`read_frame`].
pub async fn read_length<S: AsyncRead + Unpin>(stream: &mut S, limit: usize) -> io::Result<usize> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).await?;
    let length = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
    if length > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, WireError::TooLong { length, limit }));
    }
    Ok(length)
}

/// Reads the bytes of a frame whose length is known.
///
/// # Errors
/// As [`read_frame`].
pub async fn read_body<S: AsyncRead + Unpin>(stream: &mut S, length: usize) -> io::Result<Vec<u8>> {
    let mut frame = Vec::new();
    while frame.len() < length {
        let start = frame.len();
        frame.resize(length.min(start + CHUNK), 0);
        stream.read_exact(&mut frame[start..]).await?;
    }
    Ok(frame)
}

/// Writes one frame and flushes it.
///
/// # Errors
/// `InvalidData` for a frame of more than `limit` bytes, else what the stream says.
pub async fn write_frame<S: AsyncWrite + Unpin>(
    stream: &mut S,
    frame: &[u8],
    limit: usize,
) -> io::Result<()> {
    let too_long =
        || io::Error::new(io::ErrorKind::InvalidData, WireError::TooLong { length: frame.len(), limit });
    if frame.len() > limit {
        return Err(too_long());
    }
    let length = u32::try_from(frame.len()).map_err(|_| too_long())?;
    stream.write_all(&length.to_le_bytes()).await?;
    stream.write_all(frame).await?;
    stream.flush().await
}
