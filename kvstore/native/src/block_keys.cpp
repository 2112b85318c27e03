// Keys of the full blocks of one sequence: BLAKE2b (RFC 7693) over length-prefixed parts.
// `kvstore.native_keys` calls it; `kvstore.block_key` defines the keys and computes the same
// without this library. Portable: every compiler and every byte order gives the same bytes.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::size_t KEY_BYTES = 32;
constexpr std::size_t CHUNK_BYTES = 128;

constexpr std::array<std::uint64_t, 8> IV = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

constexpr std::uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

std::uint64_t load_word(const std::uint8_t* bytes) {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= std::uint64_t{bytes[i]} << (8 * i);
    return word;
}

void store_word(std::uint8_t* bytes, std::uint64_t word) {
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d,
         std::uint64_t x, std::uint64_t y) {
    a += b + x;
    d = std::rotr(d ^ a, 32);
    c += d;
    b = std::rotr(b ^ c, 24);
    a += b + y;
    d = std::rotr(d ^ a, 16);
    c += d;
    b = std::rotr(b ^ c, 63);
}

// One BLAKE2b hash without a key, in sequential mode.
class Blake2b {
public:
    explicit Blake2b(const std::uint8_t* person) : state_(IV) {
        state_[0] ^= 0x01010000 ^ KEY_BYTES;  // fan-out 1, depth 1, the digest's length
        state_[6] ^= load_word(person);
        state_[7] ^= load_word(person + 8);
    }

    void update(const std::uint8_t* bytes, std::size_t num_bytes) {
        while (num_bytes > 0) {
            if (num_buffered_ == CHUNK_BYTES) {  // more follows: this chunk is not the last
                compress(false);
                num_buffered_ = 0;
            }
            const std::size_t taken = std::min(num_bytes, CHUNK_BYTES - num_buffered_);
            std::memcpy(buffer_.data() + num_buffered_, bytes, taken);
            num_buffered_ += taken;
            num_hashed_ += taken;
            bytes += taken;
            num_bytes -= taken;
        }
    }

    void update_length(std::uint64_t length) {
        std::uint8_t bytes[8];
        store_word(bytes, length);
        update(bytes, sizeof bytes);
    }

    void finish(std::uint8_t* digest) {
        std::fill(buffer_.begin() + static_cast<std::ptrdiff_t>(num_buffered_), buffer_.end(), 0);
        compress(true);
        for (std::size_t i = 0; i < KEY_BYTES / 8; ++i) store_word(digest + 8 * i, state_[i]);
    }

private:
    void compress(bool is_last) {
        std::uint64_t m[16], v[16];
        for (int i = 0; i < 16; ++i) m[i] = load_word(buffer_.data() + 8 * i);
        for (int i = 0; i < 8; ++i) {
            v[i] = state_[i];
            v[i + 8] = IV[i];
        }
        v[12] ^= num_hashed_;
        if (is_last) v[14] = ~v[14];
        for (const auto& s : SIGMA) {
            mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
            mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
            mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
            mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
            mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
            mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
            mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
            mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
        }
        for (int i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
    }

    std::array<std::uint64_t, 8> state_;
    std::array<std::uint8_t, CHUNK_BYTES> buffer_{};
    std::size_t num_buffered_ = 0;
    std::uint64_t num_hashed_ = 0;
};

}  // namespace

// Writes the keys of successive full blocks, KEY_BYTES each. A block's key is the hash of the key
// before it, `parent` for the first, and of its token ids as 4 little-endian bytes each.
extern "C" void baton_block_keys(std::int64_t num_blocks, std::int64_t block_size,
                                 const std::uint8_t* person, const std::uint8_t* parent,
                                 const std::uint32_t* token_ids, std::uint8_t* keys) {
    for (std::int64_t block = 0; block < num_blocks; ++block) {
        Blake2b hash(person);
        hash.update_length(KEY_BYTES);
        hash.update(parent, KEY_BYTES);
        hash.update_length(4 * static_cast<std::uint64_t>(block_size));
        for (std::int64_t i = 0; i < block_size; ++i) {
            const std::uint32_t id = *token_ids++;
            const std::uint8_t bytes[4] = {
                static_cast<std::uint8_t>(id), static_cast<std::uint8_t>(id >> 8),
                static_cast<std::uint8_t>(id >> 16), static_cast<std::uint8_t>(id >> 24)};
            hash.update(bytes, sizeof bytes);
        }
        hash.finish(keys);
        parent = keys;
        keys += KEY_BYTES;
    }
}
