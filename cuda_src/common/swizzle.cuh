// The 128-byte swizzle of TMA and wgmma: tiles in shared memory whose rows of 128 bytes are read
// and written without bank conflicts.
//
// A row holds eight chunks of 16 bytes. Chunk c of row r is stored in place c ^ (r % 8), so the
// same chunk of eight successive rows lies in eight different places, and ldmatrix, stmatrix or
// eight lanes with 16-byte accesses move it in one pass over the banks. TMA applies the same rule
// to the address, so a tile that TMA reads or writes must begin at a multiple of 1024 bytes.
//
// Public: sm_80 up.
#pragma once

// Bytes of a row.
constexpr int kSwizzleRowBytes = 128;

// The byte offset, from the start of the tile, of 16-byte chunk `chunk` (0 to 7) of a row.
__device__ __forceinline__ int swizzle_128b(int row, int chunk) {
  return row * kSwizzleRowBytes + (chunk ^ (row & 7)) * 16;
}
