/* The ragged kernel: gathers rows by address, widens them, pads or packs them; every output in one call.
   kernels.py is the reference and the only caller; it checks every address and length before. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Loops that are worth a second form for wider registers; the loader of the C library picks at run time.
   They move and convert one value at a time, so both forms give the same bits. */
#if defined(__GNUC__) && defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* One output, as kernels.py lays it out. What begins with "in" says where in the block of numbers an
   int64_t[rows] begins; -1 stands for none. */
typedef struct {
    int64_t source, target; /* dtype codes */
    int64_t out;            /* a pointer as an integer */
    int64_t rows;
    int64_t in_address; /* an address of 0 is a null row; none: all are */
    int64_t in_skip, in_count, in_at;
    int64_t width;            /* elements of a padded row; 0: no padding is to be written */
    int64_t fill, null_value; /* the bytes of one element, in the first bytes */
    int64_t positions;        /* null rows count 0, 1, 2, ... */
    int64_t in_split;         /* null rows hold 0 before it */
    int64_t left_rows, in_left_at, in_left_count; /* values of the batch before, to be cleared */
} job_t;

enum { I8, U8, I16, U16, I32, U32, I64, U64, F32, F64 };

static const int64_t SIZES[] = {1, 1, 2, 2, 4, 4, 8, 8, 4, 8};

WIDE static void fill(char *out, int64_t size, int64_t bits, int64_t count)
{
    if (count <= 0) return;
    if (bits == 0 || size == 1) {
        unsigned char byte;
        memcpy(&byte, &bits, 1);
        memset(out, byte, (size_t)(count * size));
    } else if (size == 2) {
        uint16_t value, *to = (uint16_t *)out;
        memcpy(&value, &bits, 2);
        for (int64_t i = 0; i < count; i++) to[i] = value;
    } else if (size == 4) {
        uint32_t value, *to = (uint32_t *)out;
        memcpy(&value, &bits, 4);
        for (int64_t i = 0; i < count; i++) to[i] = value;
    } else {
        uint64_t value, *to = (uint64_t *)out;
        memcpy(&value, &bits, 8);
        for (int64_t i = 0; i < count; i++) to[i] = value;
    }
}

#define WIDEN(S, s, T, t)                                        \
    case S * 16 + T: {                                           \
        const s *restrict from = (const s *)source;              \
        t *restrict to = (t *)out;                               \
        for (int64_t i = 0; i < count; i++) to[i] = (t)from[i];  \
        return;                                                  \
    }

#define WIDEN_WHOLE(S, s)                                                                         \
    WIDEN(S, s, I8, int8_t) WIDEN(S, s, I32, int32_t) WIDEN(S, s, I64, int64_t)                   \
    WIDEN(S, s, F32, float) WIDEN(S, s, F64, double)

WIDE static void copy(char *out, const char *source, int64_t from_type, int64_t to_type, int64_t count)
{
    if (count <= 0) return;
    if (from_type == to_type) {
        memcpy(out, source, (size_t)(count * SIZES[to_type]));
        return;
    }
    switch (from_type * 16 + to_type) {
        WIDEN_WHOLE(I8, int8_t)
        WIDEN_WHOLE(U8, uint8_t)
        WIDEN_WHOLE(I16, int16_t)
        WIDEN_WHOLE(U16, uint16_t)
        WIDEN_WHOLE(I32, int32_t)
        WIDEN_WHOLE(U32, uint32_t)
        WIDEN_WHOLE(I64, int64_t)
        WIDEN_WHOLE(U64, uint64_t)
        WIDEN(F32, float, F64, double)
        WIDEN(F64, double, F32, float)
    }
}

WIDE static void count_up(char *out, int64_t type, int64_t count)
{
    if (type == I64) {
        for (int64_t i = 0; i < count; i++) ((int64_t *)out)[i] = i;
    } else {
        for (int64_t i = 0; i < count; i++) ((int32_t *)out)[i] = (int32_t)i;
    }
}

/* Rows lie anywhere in memory and are short, so that the hardware foresees none of them: the next row's
   first page is asked for while this one is copied, which takes a tenth to a quarter off the time of a packed
   batch in here. */
static void foresee(const char *from, int64_t bytes)
{
#if defined(__GNUC__)
    if (bytes > 4096) bytes = 4096;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 1);
#endif
}

static void write_one(const job_t *job, const int64_t *numbers)
{
    const int64_t size = SIZES[job->target], source_size = SIZES[job->source];
    const int64_t *address = job->in_address < 0 ? NULL : numbers + job->in_address;
    const int64_t *split = job->in_split < 0 ? NULL : numbers + job->in_split;
    const int64_t *skip = numbers + job->in_skip, *count = numbers + job->in_count;
    const int64_t *at = numbers + job->in_at;
    const int64_t *left_at = numbers + job->in_left_at, *left_count = numbers + job->in_left_count;
    char *out = (char *)(intptr_t)job->out;

    for (int64_t row = 0; row < job->left_rows; row++)
        fill(out + left_at[row] * size, size, job->fill, left_count[row]);
    for (int64_t row = 0; row < job->rows; row++) {
        const int64_t n = count[row], next = row + 1;
        char *to = out + at[row] * size;
        if (address && next < job->rows && address[next])
            foresee((const char *)(intptr_t)address[next] + skip[next] * source_size, count[next] * source_size);
        if (job->width) {
            const int64_t begin = row * job->width, end = begin + job->width;
            fill(out + begin * size, size, job->fill, at[row] - begin);
            fill(to + n * size, size, job->fill, end - at[row] - n);
        }
        if (address && address[row]) {
            const int64_t from = address[row] + skip[row] * source_size;
            copy(to, (const char *)(intptr_t)from, job->source, job->target, n);
        } else if (job->positions) {
            count_up(to, job->target, n);
        } else {
            int64_t before = split ? split[row] - skip[row] : 0;
            before = before < 0 ? 0 : before > n ? n : before;
            fill(to, size, 0, before);
            fill(to + before * size, size, job->null_value, n - before);
        }
    }
}

EXPORT void trajstore_write(const job_t *jobs, int64_t count, const int64_t *numbers)
{
    for (int64_t i = 0; i < count; i++) write_one(jobs + i, numbers);
}
