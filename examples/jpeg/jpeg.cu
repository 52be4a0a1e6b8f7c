// JPEG to the input of a classifier: entropy decoding, inverse DCT, colours, bilinear resize, normalisation; and its answer.
// Baseline JPEG, grey or colour, any sampling by 1 or 2, restart markers. blockIdx.z is the request's place in its batch.
// Nothing outside a request's own buffers is touched, whatever its file holds: every index is checked against what it was given.

#ifndef FILE_BYTES  // as the graph declares its buffers
#define FILE_BYTES 32768
#define MAX_H 96
#define MAX_W 512
#define OUT_H 48
#define OUT_W 192
#endif
#define MAX_BLOCKS (3 * (MAX_H / 8 + 2) * (MAX_W / 8 + 2))

typedef unsigned char byte;

struct Bits {
    const byte *file;
    int at, end, count;
    unsigned held;
};

struct Huffman {
    int least[17], most[18], first[17];
    byte symbols[256];
};

struct Head {
    int is_good, height, width, parts, mcus_x, mcus_y, restart;
    int across[3], down[3], quant[3], dc[3], ac[3], blocks_x[3], first_block[3], blocks;
    int most_across, most_down;
    float quants[4][64];
    struct Huffman tables[2][4];
};

__device__ static const byte ZIGZAG[64] = {
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

__device__ static int word(const byte *file, int at, int end) { return at + 1 < end ? file[at] << 8 | file[at + 1] : 0; }

__device__ static void make_table(struct Huffman *table, const byte *counts) {
    int code = 0, place = 0;
    for (int length = 1; length <= 16; ++length) {
        table->first[length] = place;
        table->least[length] = code;
        place += counts[length - 1];
        code += counts[length - 1];
        table->most[length] = counts[length - 1] ? code - 1 : -1;
        code <<= 1;
    }
}

__device__ static int next_bit(struct Bits *bits) {
    if (!bits->count) {
        byte found = bits->at < bits->end ? bits->file[bits->at] : 0;
        if (bits->at < bits->end) {
            if (found == 0xFF && bits->at + 1 < bits->end && bits->file[bits->at + 1] != 0)
                found = 0;  // a marker: no more bits until it is dealt with
            else
                bits->at += found == 0xFF ? 2 : 1;
        }
        bits->held = found;
        bits->count = 8;
    }
    --bits->count;
    return bits->held >> bits->count & 1;
}

__device__ static int symbol(struct Bits *bits, const struct Huffman *table) {
    int code = 0;
    for (int length = 1; length <= 16; ++length) {
        code = code << 1 | next_bit(bits);
        if (table->most[length] >= 0 && code <= table->most[length] && code >= table->least[length]) {
            int place = table->first[length] + code - table->least[length];
            return place < 256 ? table->symbols[place] : -1;
        }
    }
    return -1;
}

__device__ static int number(struct Bits *bits, int length) {
    int value = 0;
    for (int place = 0; place < length; ++place) value = value << 1 | next_bit(bits);
    return length && value < 1 << (length - 1) ? value - (1 << length) + 1 : value;
}

__device__ static int read_block(struct Bits *bits, const struct Head *head, int part, int *before, short *block) {
    for (int place = 0; place < 64; ++place) block[place] = 0;
    int length = symbol(bits, &head->tables[0][head->dc[part]]);
    if (length < 0 || length > 11) return 0;
    *before += number(bits, length);
    block[0] = (short)*before;
    for (int place = 1; place < 64; ++place) {
        int found = symbol(bits, &head->tables[1][head->ac[part]]);
        if (found < 0) return 0;
        int run = found >> 4, size = found & 15;
        if (!size) {
            if (run != 15) break;
            place += 15;
            continue;
        }
        place += run;
        if (place > 63) return 0;
        block[ZIGZAG[place]] = (short)number(bits, size);
    }
    return 1;
}

__device__ static int read_frame(struct Head *head, const byte *file, int at, int end) {
    head->height = word(file, at + 3, end);
    head->width = word(file, at + 5, end);
    head->parts = at + 7 < end ? file[at + 7] : 0;
    if (at + 8 + 3 * head->parts > end || (head->parts != 1 && head->parts != 3) || file[at + 2] != 8) return 0;
    if (head->height < 1 || head->height > MAX_H || head->width < 1 || head->width > MAX_W) return 0;
    head->most_across = head->most_down = 1;
    for (int part = 0; part < head->parts; ++part) {
        int sampling = file[at + 9 + 3 * part];
        head->across[part] = head->parts == 1 ? 1 : sampling >> 4;
        head->down[part] = head->parts == 1 ? 1 : sampling & 15;
        head->quant[part] = file[at + 10 + 3 * part] & 3;
        if (head->across[part] < 1 || head->across[part] > 2 || head->down[part] < 1 || head->down[part] > 2) return 0;
        if (head->across[part] > head->most_across) head->most_across = head->across[part];
        if (head->down[part] > head->most_down) head->most_down = head->down[part];
    }
    head->mcus_x = (head->width + 8 * head->most_across - 1) / (8 * head->most_across);
    head->mcus_y = (head->height + 8 * head->most_down - 1) / (8 * head->most_down);
    head->blocks = 0;
    for (int part = 0; part < head->parts; ++part) {
        head->blocks_x[part] = head->mcus_x * head->across[part];
        head->first_block[part] = head->blocks;
        head->blocks += head->blocks_x[part] * head->mcus_y * head->down[part];
    }
    return head->blocks <= MAX_BLOCKS;
}

__device__ static int read_scan(struct Head *head, struct Bits *bits, short *blocks) {
    int before[3] = {0, 0, 0}, left = head->restart;
    for (int mcu = 0; mcu < head->mcus_x * head->mcus_y; ++mcu) {
        if (head->restart && !left) {  // to the marker, over it, and anew
            bits->count = 0;
            while (bits->at + 1 < bits->end && !(bits->file[bits->at] == 0xFF && (bits->file[bits->at + 1] & 0xF8) == 0xD0)) ++bits->at;
            bits->at += 2;
            before[0] = before[1] = before[2] = 0;
            left = head->restart;
        }
        --left;
        for (int part = 0; part < head->parts; ++part)
            for (int y = 0; y < head->down[part]; ++y)
                for (int x = 0; x < head->across[part]; ++x) {
                    int row = mcu / head->mcus_x * head->down[part] + y, column = mcu % head->mcus_x * head->across[part] + x;
                    short *block = blocks + 64 * (head->first_block[part] + row * head->blocks_x[part] + column);
                    if (!read_block(bits, head, part, &before[part], block)) return 0;
                }
    }
    return 1;
}

__device__ static int read_file(struct Head *head, const byte *file, int end, short *blocks) {
    int at = 2, has_frame = 0, has_tables = 0;
    head->restart = 0;
    for (int table = 0; table < 8; ++table)
        for (int length = 0; length < 17; ++length) head->tables[table / 4][table % 4].most[length] = -1;
    if (end > FILE_BYTES || end < 4 || word(file, 0, end) != 0xFFD8) return 0;
    while (at + 4 <= end) {
        int marker = word(file, at, end), size = word(file, at + 2, end), stop = at + 2 + size;
        if (marker < 0xFF01 || size < 2 || stop > end) return 0;
        int from = at + 4;
        if (marker == 0xFFDB) {
            while (from < stop) {
                int wide = file[from] >> 4, table = file[from] & 3;
                if (wide > 1 || from + 1 + 64 * (wide + 1) > stop) return 0;
                for (int place = 0; place < 64; ++place)
                    head->quants[table][ZIGZAG[place]] = wide ? word(file, from + 1 + 2 * place, end) : file[from + 1 + place];
                from += 1 + 64 * (wide + 1);
            }
            has_tables |= 1;
        } else if (marker == 0xFFC4) {
            while (from + 17 <= stop) {
                struct Huffman *table = &head->tables[file[from] >> 4 & 1][file[from] & 3];
                int count = 0;
                for (int length = 0; length < 16; ++length) count += file[from + 1 + length];
                if (count > 256 || from + 17 + count > stop) return 0;
                make_table(table, file + from + 1);
                for (int place = 0; place < count; ++place) table->symbols[place] = file[from + 17 + place];
                from += 17 + count;
            }
            has_tables |= 2;
        } else if (marker == 0xFFC0 || marker == 0xFFC1) {
            if (!read_frame(head, file, at + 2, stop)) return 0;
            has_frame = 1;
        } else if (marker == 0xFFDD) {
            head->restart = word(file, from, end);
        } else if (marker == 0xFFDA) {
            if (!has_frame || has_tables != 3 || from >= end || file[from] != head->parts || from + 1 + 2 * head->parts > stop) return 0;
            for (int part = 0; part < head->parts; ++part) {
                head->dc[part] = file[from + 2 + 2 * part] >> 4 & 3;
                head->ac[part] = file[from + 2 + 2 * part] & 3;
            }
            struct Bits bits = {file, stop, end, 0, 0};
            return read_scan(head, &bits, blocks);
        } else if (marker >= 0xFFC2 && marker <= 0xFFCF && marker != 0xFFC8 && marker != 0xFFCC) {
            return 0;  // progressive, lossless, arithmetic: not here
        }
        at = stop;
    }
    return 0;
}

__device__ static void inverse_dct(short *block, const float *quant) {
    float rows[64];
    for (int v = 0; v < 8; ++v)
        for (int x = 0; x < 8; ++x) {
            float sum = 0;
            for (int u = 0; u < 8; ++u)
                sum += (u ? 1.0f : 0.70710678f) * block[8 * v + u] * quant[8 * v + u] * cosf((2 * x + 1) * u * 0.19634954f);
            rows[8 * v + x] = sum / 2;
        }
    for (int x = 0; x < 8; ++x)
        for (int y = 0; y < 8; ++y) {
            float sum = 0;
            for (int v = 0; v < 8; ++v) sum += (v ? 1.0f : 0.70710678f) * rows[8 * v + x] * cosf((2 * y + 1) * v * 0.19634954f);
            float level = sum / 2 + 128.5f;
            block[8 * y + x] = (short)(level < 0 ? 0 : level > 255 ? 255 : level);
        }
}

__device__ static int sample(const struct Head *head, const short *blocks, int part, int y, int x) {
    y = y * head->down[part] / head->most_down;
    x = x * head->across[part] / head->most_across;
    return blocks[64 * (head->first_block[part] + y / 8 * head->blocks_x[part] + x / 8) + 8 * (y % 8) + x % 8];
}

__device__ static byte level(float value) { return (byte)(value < 0 ? 0 : value > 255 ? 255 : value + 0.5f); }

extern "C" __global__ void jpeg_decode(const byte *files, const int *sizes, short *scratch, byte *pixels, int *extents) {
    __shared__ struct Head head;
    long z = blockIdx.z;
    short *blocks = scratch + z * MAX_BLOCKS * 64;
    if (threadIdx.x == 0) head.is_good = read_file(&head, files + z * FILE_BYTES, sizes[z], blocks);
    __syncthreads();
    if (threadIdx.x == 0) {
        extents[2 * z] = head.is_good ? head.height : 0;
        extents[2 * z + 1] = head.is_good ? head.width : 0;
    }
    if (!head.is_good) return;
    for (int block = threadIdx.x; block < head.blocks; block += blockDim.x) {
        int part = head.parts == 1 || block < head.first_block[1] ? 0 : block < head.first_block[2] ? 1 : 2;
        inverse_dct(blocks + 64 * block, head.quants[head.quant[part]]);
    }
    __syncthreads();
    for (int place = threadIdx.x; place < head.height * head.width; place += blockDim.x) {
        int y = place / head.width, x = place % head.width;
        float luma = sample(&head, blocks, 0, y, x), blue = 0, red = 0;
        if (head.parts == 3) {
            blue = sample(&head, blocks, 1, y, x) - 128.0f;
            red = sample(&head, blocks, 2, y, x) - 128.0f;
        }
        byte *pixel = pixels + ((z * MAX_H + y) * MAX_W + x) * 3;  // blue first, as the classifier was trained
        pixel[0] = level(luma + 1.772f * blue);
        pixel[1] = level(luma - 0.344136f * blue - 0.714136f * red);
        pixel[2] = level(luma + 1.402f * red);
    }
}

// To OUT_H rows, as wide as the image's shape asks for and OUT_W at most; -1 to 1; what is left over is 0.
extern "C" __global__ void resize(const byte *pixels, const int *extents, float *ready) {
    long z = blockIdx.z;
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int height = extents[2 * z], width = extents[2 * z + 1];
    if (x >= OUT_W || y >= OUT_H || !height) return;
    int wide = (OUT_H * width + height - 1) / height;
    if (wide > OUT_W) wide = OUT_W;
    if (x >= wide) return;
    float from_y = (y + 0.5f) * height / OUT_H - 0.5f, from_x = (x + 0.5f) * width / wide - 0.5f;
    from_y = from_y < 0 ? 0 : from_y > height - 1 ? height - 1 : from_y;
    from_x = from_x < 0 ? 0 : from_x > width - 1 ? width - 1 : from_x;
    int y0 = (int)from_y, x0 = (int)from_x, y1 = y0 + 1 < height ? y0 + 1 : y0, x1 = x0 + 1 < width ? x0 + 1 : x0;
    float dy = from_y - y0, dx = from_x - x0;
    const byte *image = pixels + z * MAX_H * MAX_W * 3;
    for (int part = 0; part < 3; ++part) {
        float top = image[(y0 * MAX_W + x0) * 3 + part] * (1 - dx) + image[(y0 * MAX_W + x1) * 3 + part] * dx;
        float low = image[(y1 * MAX_W + x0) * 3 + part] * (1 - dx) + image[(y1 * MAX_W + x1) * 3 + part] * dx;
        ready[((z * 3 + part) * OUT_H + y) * OUT_W + x] = (top * (1 - dy) + low * dy) / 127.5f - 1;
    }
}

// The larger of two chances, and how large; -1 for a file that was none.
extern "C" __global__ void answer(const float *chances, const int *extents, int *label, float *sureness) {
    long z = blockIdx.z;
    if (threadIdx.x) return;
    int is_turned = chances[2 * z + 1] > chances[2 * z];
    label[z] = extents[2 * z] ? is_turned : -1;
    sureness[z] = extents[2 * z] ? chances[2 * z + is_turned] : 0;
}
