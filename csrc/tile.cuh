// The part of a row that a team holds in registers: kCount packs a thread. A row that fits into one tile is read from
// memory once; a longer one is walked tile by tile, and read again in each walk.
#pragma once

#include <string.h>

#include "element.cuh"
#include "team.cuh"

namespace megapipe {

constexpr int kPacks = 4;  // independent 16-byte loads in flight per thread

// Most threads of a block, by the number of tiles that each holds: 64 or 128 registers a thread.
constexpr int kOneTileThreads = 1024;
constexpr int kTwoTileThreads = 512;

// Columns of a row that exist for a kernel: [first, stop).
struct Columns {
  int first;
  int stop;
  __device__ bool contains(int column) const { return column >= first && column < stop; }
};

template <typename T, bool kVector, int kPackElements = kPackSize<T, kVector>, int kCount = kPacks>
struct Tile {
  static constexpr int kSize = kPackElements;
  using TilePack = Pack<T, kSize>;
  TilePack packs[kCount];

  static __device__ int count(int width, const Team& team) {
    const int span = team.threads * kCount * kSize;
    return (width + span - 1) / span;
  }

  // In 16-byte accesses neighbouring threads hold neighbouring packs, else neighbouring elements.
  static __device__ int column(const Team& team, int tile, int pack, int element) {
    if constexpr (kVector) return ((tile * kCount + pack) * team.threads + team.thread) * kSize + element;
    return ((tile * kCount + pack) * kSize + element) * team.threads + team.thread;
  }

  // One pack of a row. Elements outside of `columns` become zero, or arbitrary where their pack reaches into it.
  static __device__ TilePack load_pack(const T* row, Columns columns, const Team& team, int tile, int pack) {
    TilePack loaded;
    const int start = column(team, tile, pack, 0);
    if (kVector && start < columns.stop && start + kSize > columns.first) {
      return *reinterpret_cast<const TilePack*>(row + start);
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const int c = column(team, tile, pack, e);
      loaded.values[e] = !kVector && columns.contains(c) ? row[c] : T{};
    }
    return loaded;
  }

  // Writes columns [0, width).
  static __device__ void store_pack(T* row, int width, const Team& team, int tile, int pack, const TilePack& stored) {
    if constexpr (kVector) {
      const int start = column(team, tile, pack, 0);
      if (start < width) *reinterpret_cast<TilePack*>(row + start) = stored;
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        const int c = column(team, tile, pack, e);
        if (c < width) row[c] = stored.values[e];
      }
    }
  }

  __device__ void load(const T* row, Columns columns, const Team& team, int tile) {
#pragma unroll
    for (int p = 0; p < kCount; ++p) packs[p] = load_pack(row, columns, team, tile, p);
  }

  // Makes the compiler keep the packs as they are: across a reduction it would rather hold every element widened,
  // in twice the registers, and spill.
  __device__ void stay_packed() {
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
      uint32_t words[sizeof(TilePack) / 4];
      memcpy(words, &packs[p], sizeof(TilePack));
#pragma unroll
      for (uint32_t& word : words) asm volatile("" : "+r"(word));
      memcpy(&packs[p], words, sizeof(TilePack));
    }
  }

  // Calls visit(value, column) for every element.
  template <typename Visit>
  __device__ void each(const Team& team, int tile, Visit visit) const {
#pragma unroll
    for (int p = 0; p < kCount; ++p) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) visit(widen(packs[p].values[e]), column(team, tile, p, e));
    }
  }
};

}  // namespace megapipe
