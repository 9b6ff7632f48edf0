/* Lapilli player: runs .lap programs on any Vulkan device. C ABI, the only way in.
 *
 * Every function returns a status and never aborts or throws; on failure lapilli_last_error() holds a sentence that says
 * what was given, what is possible and what to do.
 *
 * Threads. All functions may be called from any thread, and from several at once, also with the same program, run, stream or
 * buffer. Three things are left to the caller, as with free(): when lapilli_destroy, lapilli_release, lapilli_stream_destroy
 * or lapilli_buffer_destroy is called, all other calls with that handle have returned, and none follows (lapilli_destroy and
 * lapilli_release wait for what the device does, not for calls of other threads; a program may be destroyed before its runs
 * are released); memory that a call reads is not written meanwhile; and lapilli_output's memory is read before lapilli_release.
 *
 * Failures. A call that fails has done nothing, and what was queued or submitted before it takes place all the same. In detail:
 * - LAPILLI_OUT_OF_MEMORY: the call may be made again. A range that lapilli_buffer_write was to fill holds anything. Work of a
 *   stream that the driver cannot accept for lack of memory is kept, and submitted by a later call; where the driver could not
 *   even keep it, the stream says LAPILLI_DEVICE_LOST from then on, and so do programs whose states it was to change, until
 *   lapilli_reset. lapilli_wait, and lapilli_run_sync after the run took place, fail with it where results cannot be read.
 * - LAPILLI_DEVICE_LOST: the driver lost the device, or the above. What is in programs, runs, streams and buffers of that device
 *   is lost; calls with them say so, and destroying them works. A program that is loaded, or a stream that is made, after that
 *   opens the device anew, also while the old ones exist.
 * - LAPILLI_TIMEOUT: only where a timeout was given. Calls that wait without one do so until the device is done or lost, however
 *   long that takes: there is no limit but the driver's own (most drivers of GPUs end work after some seconds).
 *
 * Forks. A device does not survive fork(). In a child of a process that uses Vulkan (that has loaded a program, made a stream or
 * listed devices) every call that needs a device fails at once with LAPILLI_DEVICE_LOST, and destroying does nothing. A process
 * may fork first and use devices in its children.
 */
#ifndef LAPILLI_H
#define LAPILLI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* BEGIN CDEF (read by cffi at build time: plain C from here on) */

typedef enum lapilli_status {
  LAPILLI_OK = 0,
  LAPILLI_INVALID_ARGUMENT = 1, /* wrong count, shape, dtype or rank of an input; unknown name */
  LAPILLI_INVALID_FILE = 2,     /* not a program, damaged, truncated, or of another version */
  LAPILLI_IO_ERROR = 3,         /* the file cannot be opened or read */
  LAPILLI_NO_DRIVER = 4,        /* no Vulkan loader or driver on this machine */
  LAPILLI_NO_DEVICE = 5,        /* no such device, or none that satisfies a plan of the program */
  LAPILLI_OUT_OF_MEMORY = 6,    /* host or device memory */
  LAPILLI_DEVICE_LOST = 7,      /* or queued work, or the process is a fork: see above */
  LAPILLI_TIMEOUT = 8,
  LAPILLI_INTERNAL = 9,
  LAPILLI_UNSUPPORTED = 10, /* the program has operators that the player cannot run, and the caller did not offer to */
  LAPILLI_OUT_OF_RANGE = 11 /* a run computed int64 values that do not fit into 32 bits */
} lapilli_status;

/* clang-format off */
typedef enum lapilli_dtype {
  LAPILLI_BOOL = 0, LAPILLI_UINT8 = 1, LAPILLI_INT8 = 2, LAPILLI_INT16 = 3, LAPILLI_INT32 = 4, LAPILLI_INT64 = 5,
  LAPILLI_FLOAT16 = 6, LAPILLI_BFLOAT16 = 7, LAPILLI_FLOAT32 = 8, LAPILLI_FLOAT64 = 9
} lapilli_dtype;
/* clang-format on */

/* clang-format off */
typedef enum lapilli_device_type {
  LAPILLI_DEVICE_OTHER = 0, LAPILLI_DEVICE_INTEGRATED = 1, LAPILLI_DEVICE_DISCRETE = 2, LAPILLI_DEVICE_VIRTUAL = 3,
  LAPILLI_DEVICE_CPU = 4
} lapilli_device_type;
/* clang-format on */

#define LAPILLI_MAX_RANK 16

typedef struct lapilli_program lapilli_program; /* a loaded program on one device */
typedef struct lapilli_run lapilli_run;         /* one run in flight or finished */
typedef struct lapilli_stream lapilli_stream;   /* work on one device in order, and the memory that it uses */
typedef struct lapilli_buffer lapilli_buffer;   /* device memory of a stream */

/* A dense row-major tensor in host memory. */
typedef struct lapilli_tensor {
  void *data;
  uint64_t size; /* bytes */
  int64_t shape[16];
  uint32_t rank;
  uint32_t dtype; /* lapilli_dtype */
} lapilli_tensor;

/* What a file may cost, for those who open files of strangers. 0: the default. Fields are only added at the end.
 *
 * These cannot be changed: 1,024 methods, of a method 64 plans, 32 symbols, 4,096 inputs and 4,096 outputs of at most 16
 * dimensions; of a plan 32,768 buffers, 65,536 commands in a run and as many at load; 65,536 kernels of at most 32 bindings and
 * 128 bytes of push constants; 16,384 states; names of 65,536 bytes, of symbols 256; a buffer is at most 4,096 bytes larger than
 * the constant, state, input or output in it. What is read takes at most four times the structure, and 1 MiB. */
typedef struct lapilli_limits {
  uint64_t struct_size;       /* sizeof(lapilli_limits) */
  uint64_t structure_bytes;   /* of the tables: 64 MiB */
  uint64_t code_bytes;        /* SPIR-V of all kernels together: 256 MiB */
  uint64_t entries;           /* items of all lists in the tables: 4,194,304 */
  uint64_t expressions;       /* of all methods: 1,048,576 */
  uint64_t description_bytes; /* JSON of lapilli_describe: 64 MiB */
  uint64_t device_bytes;      /* memory for a program and its runs, on the device and for transfers: all that there is */
  uint64_t groups;            /* work groups of one command: 2^30 */
  uint64_t run_nanoseconds;   /* that lapilli_run_sync, lapilli_wait and lapilli_release wait at most: no limit */
} lapilli_limits;

typedef struct lapilli_load_options {
  const char *device;           /* index or part of a name; NULL: the environment variable LAPILLI_DEVICE, else the best device */
  const char *plan;             /* name of the plan to take; NULL: the first that the device satisfies */
  const char *cache_dir;        /* pipeline cache; NULL: the user's cache folder; "": no cache on disk */
  uint64_t staging_size;        /* bytes of the upload buffer; 0: 16 MiB */
  int32_t skip_checksum;        /* 1: do not verify the checksum (structure is always verified) */
  int32_t validation;           /* 1: enable VK_LAYER_KHRONOS_validation with synchronization validation */
  int32_t allow_host;           /* 1: load a program with host operators too; the caller computes those between its methods */
  const lapilli_limits *limits; /* NULL: the defaults */
} lapilli_load_options;

typedef struct lapilli_memory_info {
  uint64_t constants;    /* bytes on the device: constants and packed constants */
  uint64_t states;       /* bytes on the device: states and their initial values */
  uint64_t arena;        /* bytes of one run's arena at the sizes last recorded */
  uint64_t arena_sum;    /* bytes all arena tensors would take without sharing */
  uint64_t io;           /* bytes of input and output buffers */
  uint64_t device_total; /* all device memory allocated by this program */
} lapilli_memory_info;

typedef struct lapilli_load_times { /* nanoseconds */
  uint64_t open;                    /* map, verify */
  uint64_t device;                  /* instance and device creation (0 when already there) */
  uint64_t pipelines;               /* shader modules and pipelines */
  uint64_t constants;               /* upload and load commands */
  uint64_t total;
} lapilli_load_times;

typedef struct lapilli_method_info {
  const char *name; /* valid as long as the program */
  uint32_t inputs;
  uint32_t outputs;
  uint32_t commands; /* dispatches of a run in the chosen plan */
} lapilli_method_info;

/* What an input or output must be. A dynamic size has shape -1 and, where it is known, bounds (-1: unknown or none). */
typedef struct lapilli_spec {
  const char *name; /* valid as long as the program */
  uint32_t dtype;   /* lapilli_dtype */
  uint32_t rank;
  int64_t shape[16];
  int64_t min[16];
  int64_t max[16];
} lapilli_spec;

const char *lapilli_version(void);
const char *lapilli_last_error(void); /* of this thread; never NULL */

/* 64-bit checksum as stored in the header of a file (XXH64 with seed `seed`). */
uint64_t lapilli_checksum(const void *data, uint64_t size, uint64_t seed);

/* Devices, best first: discrete, integrated, virtual, other, CPU. A JSON array of objects: index, name, type, vendor_id,
 * driver, driver_version, api_version, memory (bytes), limits {...}, features {...}. The string belongs to the caller. */
lapilli_status lapilli_devices(char **json);
void lapilli_free(void *p);

/* Load a program from a file or from memory. Neither is needed any more when the call returns; a file that changes meanwhile
 * is refused, or its constants are those of any moment. */
lapilli_status lapilli_load(const char *path, const lapilli_load_options *options, lapilli_program **program);
lapilli_status lapilli_load_memory(const void *data, uint64_t size, const lapilli_load_options *options, lapilli_program **program);
void lapilli_destroy(lapilli_program *program); /* waits for its runs that are in flight */

/* Verify a file and describe it (no device needed): JSON with methods, symbols, inputs, outputs, plans (requirements,
 * buffers, dispatches), checks of int64 results, kernels, constants, states, host operators, metadata. limits may be null. */
lapilli_status lapilli_describe(const void *data, uint64_t size, int32_t skip_checksum, const lapilli_limits *limits, char **json);
lapilli_status lapilli_describe_file(const char *path, int32_t skip_checksum, const lapilli_limits *limits, char **json);

/* Of a loaded program: JSON {device: {as in lapilli_devices}, methods: [{name, plan, plan_index, missing: [{plan,
 * reasons: [sentences]}]}], states: [names], host_operators: [names], input_path, output_path, pipeline_cache: {file,
 * found, compiled}}; `missing` has the better plans and what the device lacks for them. */
lapilli_status lapilli_program_info(lapilli_program *program, char **json);
lapilli_status lapilli_program_memory(lapilli_program *program, lapilli_memory_info *info);
lapilli_status lapilli_program_load_times(lapilli_program *program, lapilli_load_times *times);

/* The methods of a program and the tensors that they take and give. */
uint32_t lapilli_method_count(lapilli_program *program);
lapilli_status lapilli_method(lapilli_program *program, uint32_t method, lapilli_method_info *info);
lapilli_status lapilli_input_spec(lapilli_program *program, uint32_t method, uint32_t index, lapilli_spec *spec);
lapilli_status lapilli_output_spec(lapilli_program *program, uint32_t method, uint32_t index, lapilli_spec *spec);
/* The values of all symbols of a method: what the inputs show is written, and what is given stands in `symbols` before. Checks the
 * number of inputs, dtypes, ranks and bounds, as a run does; the data is not read. */
lapilli_status lapilli_symbols(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                               int64_t *symbols, uint32_t n_symbols);
/* What the first n_outputs outputs are for these values of the method's symbols: shape, rank, dtype and size are written, data is
 * left as it is. Nothing is run. */
lapilli_status lapilli_output_shapes(lapilli_program *program, uint32_t method, const int64_t *symbols, uint32_t n_symbols,
                                     lapilli_tensor *outputs, uint32_t n_outputs);

/* States: tensors that stay on the device from run to run. Runs of a program that has states take place one after the other,
 * in the order of their submission; each sees what the ones before it left. The calls below take their place in that order,
 * and wait for what was submitted before them. */
uint32_t lapilli_state_count(lapilli_program *program);
lapilli_status lapilli_state_spec(lapilli_program *program, uint32_t index, lapilli_spec *spec);
/* All states get their initial values back. */
lapilli_status lapilli_reset(lapilli_program *program);
/* The value of one state; size: bytes of the whole tensor. */
lapilli_status lapilli_state_read(lapilli_program *program, uint32_t index, void *data, uint64_t size);
lapilli_status lapilli_state_write(lapilli_program *program, uint32_t index, const void *data, uint64_t size);

/* Where the memory planner puts arena buffers for given sizes, and what the commands cost: JSON {arena, sum, lower_bound,
 * buffers: [{buffer, block, offset, size}], commands: [{groups: [x, y, z], flops, bytes}]}.
 * method and plan by index; symbols: one value per symbol of the method. No device is needed. */
lapilli_status lapilli_plan_memory(const void *data, uint64_t size, int32_t skip_checksum, uint32_t method, uint32_t plan,
                                   const int64_t *symbols, uint32_t n_symbols, char **json);
lapilli_status lapilli_plan_memory_file(const char *path, int32_t skip_checksum, uint32_t method, uint32_t plan,
                                        const int64_t *symbols, uint32_t n_symbols, char **json);

/* Run and wait. LAPILLI_OUT_OF_RANGE where the run found int64 results that do not fit into the 32 bits in which kernels
 * compute: no output was written, and states have changed. Outputs: data points to caller memory of at least the output's
 * size; shape, rank, dtype and size are written back. Output buffers that are too small: LAPILLI_INVALID_ARGUMENT and the
 * needed sizes are written. */
lapilli_status lapilli_run_sync(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                                lapilli_tensor *outputs, uint32_t n_outputs);

/* Submit without waiting. The inputs are copied before it returns. */
lapilli_status lapilli_submit(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                              lapilli_run **run);
/* The same for a method that takes sizes which none of its inputs shows: `sizes` are the values of the symbols that
 * lapilli_describe says are "given", in their order. Other calls that take inputs on the host refuse such a method. */
lapilli_status lapilli_submit_sized(lapilli_program *program, uint32_t method, const int64_t *sizes, uint32_t n_sizes,
                                    const lapilli_tensor *inputs, uint32_t n_inputs, lapilli_run **run);
/* Wait for a run; timeout in nanoseconds (UINT64_MAX: no limit); LAPILLI_TIMEOUT when it is not finished then;
 * LAPILLI_OUT_OF_RANGE as for lapilli_run_sync. */
lapilli_status lapilli_wait(lapilli_run *run, uint64_t timeout);
/* After a successful wait: output i. data points into memory of the run, valid until lapilli_release. */
lapilli_status lapilli_output(lapilli_run *run, uint32_t index, lapilli_tensor *tensor);
/* Give a run back (waits for it if it is still running). */
void lapilli_release(lapilli_run *run);

/* Run once with a GPU timestamp around every dispatch: nanoseconds[i] for run command i of the plan (0 when left out),
 * and the whole run's time in *total. n is the capacity; *count receives the number of commands. Each dispatch is timed
 * alone (a barrier before and after), `repeat` times; the median is reported. States are left as they were. */
lapilli_status lapilli_profile(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                               uint32_t repeat, uint64_t *nanoseconds, uint32_t n, uint32_t *count, uint64_t *total);

/* Contents of a device buffer of the plan after running up to and including command `command` (for verification):
 * bytes are copied to data. States are left as they were. */
lapilli_status lapilli_read_buffer(lapilli_program *program, uint32_t method, const lapilli_tensor *inputs, uint32_t n_inputs,
                                   uint32_t command, uint32_t buffer, void *data, uint64_t size);

/* Streams: what is queued on one stream takes place in the order of the calls, as if one after the other; the calls
 * return before it is done. They may come from several threads; then the order is that in which they come. */

/* Where a dense row-major tensor begins in a buffer. The offset is a multiple of the device's alignment (see
 * lapilli_stream_info). */
typedef struct lapilli_slice {
  lapilli_buffer *buffer;
  uint64_t offset; /* bytes */
} lapilli_slice;

typedef struct lapilli_stream_memory_info { /* bytes, but for the last one */
  uint64_t allocated;                       /* in buffers that exist and in temporary tensors */
  uint64_t peak_allocated;                  /* the most of that so far */
  uint64_t reserved;                        /* taken from the driver: allocated and cached */
  uint64_t limit;                           /* of reserved */
  uint64_t allocations;                     /* memory objects of the driver */
} lapilli_stream_memory_info;

/* options: device and validation are used; may be null. */
lapilli_status lapilli_stream_create(const lapilli_load_options *options, lapilli_stream **stream);
/* Buffers may outlive their stream; its memory goes when all of them are destroyed. */
void lapilli_stream_destroy(lapilli_stream *stream);
/* JSON {device: {as in lapilli_devices}, alignment, max_allocation, memory} in bytes. */
lapilli_status lapilli_stream_info(lapilli_stream *stream, char **json);

/* Memory with any contents, from what the stream has cached where possible. LAPILLI_OUT_OF_MEMORY when there is not
 * enough even after all cached memory was given back. `bytes` may be 0. */
lapilli_status lapilli_buffer_create(lapilli_stream *stream, uint64_t bytes, lapilli_buffer **buffer);
/* The memory can be used again at once: work that is queued already comes first. */
void lapilli_buffer_destroy(lapilli_buffer *buffer);
/* The two calls above for callers to whom a pointer to a pointer is dear: the buffer's address, and 0 where
 * lapilli_buffer_create should be asked why. */
intptr_t lapilli_buffer_acquire(lapilli_stream *stream, uint64_t bytes);
void lapilli_buffer_release(intptr_t buffer);
/* The data is copied before the call returns; it arrives in the stream's order. */
lapilli_status lapilli_buffer_write(lapilli_buffer *buffer, uint64_t offset, const void *data, uint64_t bytes);
/* Waits for all that was queued before; calls of other threads wait meanwhile. */
lapilli_status lapilli_buffer_read(lapilli_buffer *buffer, uint64_t offset, void *data, uint64_t bytes);
/* Both buffers are of one stream. The two ranges may lie in one buffer, but not overlap. */
lapilli_status lapilli_buffer_copy(lapilli_buffer *from, uint64_t from_offset, lapilli_buffer *to, uint64_t to_offset,
                                   uint64_t bytes);
/* Repeats a pattern of four bytes; offset and bytes are multiples of 4. */
lapilli_status lapilli_buffer_fill(lapilli_buffer *buffer, uint64_t offset, uint64_t bytes, uint32_t pattern);

/* One run of a method on buffers of the stream. The program is loaded on the same device; it may be destroyed before the
 * run takes place. symbols: one value per symbol of the method, in its order. What an input or output slice must hold
 * follows from them. Slices may lie in one buffer. An output may take an input's place where the kernel that writes it needs
 * of that input only the same element for every element; an output that overlaps an input otherwise, or that is written
 * before an input in its place was read for the last time, is computed elsewhere and copied. int64 values of inputs must
 * fit into 32 bits: nobody looks. A method with checks (see lapilli_describe) has one more output, int32 []: the number of
 * the first check that failed, from 1, or 0. States of the program change in the order of the stream. */
lapilli_status lapilli_enqueue(lapilli_stream *stream, lapilli_program *program, uint32_t method, const int64_t *symbols,
                               uint32_t n_symbols, const lapilli_slice *inputs, uint32_t n_inputs, const lapilli_slice *outputs,
                               uint32_t n_outputs);
/* The same, for callers to whom every argument is dear: method, n_symbols, n_inputs and n_outputs, the symbols, and for
 * each input and output the address of its buffer and its offset, all as int64_t (at any address). */
lapilli_status lapilli_enqueue_packed(lapilli_stream *stream, lapilli_program *program, const char *words);
/* The same with memory, in one call: after n_outputs come the address of a buffer to destroy first (or 0), and the bytes of a
 * buffer to create, which is meant by slices whose address is 0. Returns the new buffer's address. 0: nothing was enqueued or
 * created, and lapilli_buffer_create or lapilli_enqueue_packed should be asked why. */
intptr_t lapilli_launch(lapilli_stream *stream, lapilli_program *program, const char *words);

/* Lets the device begin with what is queued; waits for nothing. LAPILLI_OUT_OF_MEMORY: it is still queued. */
lapilli_status lapilli_flush(lapilli_stream *stream);
/* Waits until everything is done. */
lapilli_status lapilli_synchronize(lapilli_stream *stream);
lapilli_status lapilli_stream_memory(lapilli_stream *stream, lapilli_stream_memory_info *info);
lapilli_status lapilli_reset_peak_memory(lapilli_stream *stream);
/* Gives memory that no buffer uses back to the driver; waits for the work that uses it. */
lapilli_status lapilli_empty_cache(lapilli_stream *stream);
/* Of what is taken from the driver; 0: no limit. */
lapilli_status lapilli_set_memory_limit(lapilli_stream *stream, uint64_t bytes);

/* END CDEF */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
