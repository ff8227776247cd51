// The token id of a padding row of a batch: its embedding is zero. Only decode_inputs writes it;
// the sampler's -1 ("no token") is another value.
#pragma once

constexpr int kPaddingId = -2147483647 - 1;  // PADDING_ID of engine/reference/embedding.py
