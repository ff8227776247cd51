// The token id of a row that is only there to fill a batch: embedding makes zeros of it.
// decode_inputs writes it, and nothing else does; the sampler's -1 ("no token") is not it.
#pragma once

constexpr int kPaddingId = -2147483647 - 1;  // PADDING_ID of engine/reference/embedding.py
