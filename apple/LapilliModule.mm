#import "LapilliModule.h"

#include "lapilli.hpp"

#include <string>
#include <vector>

// The same source with reference counts by the compiler, as Xcode has it, and without.
#if __has_feature(objc_arc)
#define AUTORELEASED(object) (object)
#define RELEASED(object)
#else
#define AUTORELEASED(object) [(object) autorelease]
#define RELEASED(object) [(object) release]
#endif

NSString *const LapilliErrorDomain = @"org.lapilli";

namespace {

constexpr bool is(LapilliDType dtype, lapilli_dtype of_abi) { return static_cast<int>(dtype) == static_cast<int>(of_abi); }
static_assert(is(LapilliDTypeBool, LAPILLI_BOOL) && is(LapilliDTypeUInt8, LAPILLI_UINT8) && is(LapilliDTypeInt8, LAPILLI_INT8) &&
                  is(LapilliDTypeInt16, LAPILLI_INT16) && is(LapilliDTypeInt32, LAPILLI_INT32) &&
                  is(LapilliDTypeInt64, LAPILLI_INT64) && is(LapilliDTypeFloat16, LAPILLI_FLOAT16) &&
                  is(LapilliDTypeBFloat16, LAPILLI_BFLOAT16) && is(LapilliDTypeFloat32, LAPILLI_FLOAT32) &&
                  is(LapilliDTypeFloat64, LAPILLI_FLOAT64),
              "the header has the ABI's numbers");

NSString *text_of(const std::string &text) {
  NSString *made = [NSString stringWithUTF8String:text.c_str()];
  return made != nil ? made : @"";
}

// Tells a failure. Returns nil, for `return told(...)`.
id told(const lapilli::Failure &failure, NSError **error) {
  if (error != nullptr)
    *error = [NSError errorWithDomain:LapilliErrorDomain
                                 code:static_cast<NSInteger>(failure.status)
                             userInfo:@{NSLocalizedDescriptionKey : text_of(failure.message)}];
  return nil;
}

lapilli::Shape shape_of(NSArray<NSNumber *> *numbers) {
  lapilli::Shape shape;
  for (NSNumber *number in numbers)
    shape.push_back([number longLongValue]);
  return shape;
}

} // namespace

@interface LapilliTensor ()
- (instancetype)initWithTensor:(lapilli::Tensor)tensor NS_DESIGNATED_INITIALIZER;
- (const lapilli::Tensor &)tensor;
@end

@implementation LapilliTensor

// What a Result has, as an object; nil, and the error, where it has nothing.
static LapilliTensor *made(lapilli::Result<lapilli::Tensor> result, NSError **error) {
  if (!result)
    return told(result.error(), error);
  return AUTORELEASED([[LapilliTensor alloc] initWithTensor:std::move(*result)]);
}

+ (instancetype)fromBlob:(void *)bytes
                  length:(NSUInteger)length
                   shape:(NSArray<NSNumber *> *)shape
                   dtype:(LapilliDType)dtype
                   error:(NSError **)error {
  return made(lapilli::Tensor::try_from_blob(bytes, length, shape_of(shape), static_cast<lapilli::DType>(dtype)), error);
}

+ (instancetype)fromData:(NSData *)data shape:(NSArray<NSNumber *> *)shape dtype:(LapilliDType)dtype error:(NSError **)error {
  const auto given =
      lapilli::Tensor::try_from_blob([data bytes], [data length], shape_of(shape), static_cast<lapilli::DType>(dtype));
  if (!given)
    return told(given.error(), error);
  auto copy = lapilli::Tensor::try_empty(given->shape(), given->dtype());
  if (copy)
    if (const auto copied = copy->try_copy_from(*given); !copied)
      return told(copied.error(), error);
  return made(std::move(copy), error);
}

- (instancetype)initWithTensor:(lapilli::Tensor)tensor {
  if ((self = [super init]))
    _handle = new lapilli::Tensor(std::move(tensor));
  return self;
}

- (void)dealloc {
  delete static_cast<lapilli::Tensor *>(_handle);
#if !__has_feature(objc_arc)
  [super dealloc];
#endif
}

- (const lapilli::Tensor &)tensor {
  return *static_cast<lapilli::Tensor *>(_handle);
}

- (NSArray<NSNumber *> *)shape {
  NSMutableArray<NSNumber *> *shape = [NSMutableArray array];
  for (const int64_t size : [self tensor].shape())
    [shape addObject:@(static_cast<long long>(size))];
  return shape;
}

- (LapilliDType)dtype {
  return static_cast<LapilliDType>([self tensor].dtype());
}

- (BOOL)isMetal {
  return [self tensor].is_vulkan();
}

- (LapilliTensor *)metal:(NSError **)error {
  return made([self tensor].try_vulkan(), error);
}

- (LapilliTensor *)cpu:(NSError **)error {
  return made([self tensor].try_cpu(), error);
}

- (NSData *)data:(NSError **)error {
  const auto tensor = [self tensor].try_cpu();
  if (!tensor)
    return told(tensor.error(), error);
  NSMutableData *bytes = [NSMutableData dataWithLength:static_cast<NSUInteger>(tensor->nbytes())];
  const auto over = lapilli::Tensor::try_from_blob([bytes mutableBytes], [bytes length], tensor->shape(), tensor->dtype());
  if (!over)
    return told(over.error(), error);
  if (const auto copied = over->try_copy_from(*tensor); !copied)
    return told(copied.error(), error);
  return bytes;
}

- (NSArray<NSNumber *> *)floats:(NSError **)error {
  const auto values = [self tensor].try_values<float>();
  if (!values)
    return told(values.error(), error);
  NSMutableArray<NSNumber *> *numbers = [NSMutableArray arrayWithCapacity:values->size()];
  for (const float value : *values)
    [numbers addObject:@(value)];
  return numbers;
}

- (NSString *)description {
  return text_of([self tensor].text());
}

@end

@interface LapilliModule ()
- (const lapilli::Program &)program;
@end

@implementation LapilliModule

+ (BOOL)isAvailable {
  return lapilli::is_vulkan_available();
}

- (instancetype)initWithFileAtPath:(NSString *)filePath error:(NSError **)error {
  return [self initWithFileAtPath:filePath firstRun:NO error:error];
}

- (instancetype)initWithFileAtPath:(NSString *)filePath firstRun:(BOOL)firstRun error:(NSError **)error {
  if (!(self = [super init]))
    return nil;
  lapilli::Options options;
  options.first_run = firstRun;
  // An application of iOS may write to folders of its own alone.
  NSArray<NSString *> *folders = NSSearchPathForDirectoriesInDomains(NSCachesDirectory, NSUserDomainMask, YES);
  if ([folders count] > 0)
    options.cache_dir = std::string([[[folders objectAtIndex:0] stringByAppendingPathComponent:@"lapilli"] fileSystemRepresentation]);
  auto program = lapilli::Program::try_load([filePath fileSystemRepresentation], options);
  if (!program) {
    RELEASED(self);
    return told(program.error(), error);
  }
  _handle = new lapilli::Program(std::move(*program));
  return self;
}

- (const lapilli::Program &)program {
  return *static_cast<lapilli::Program *>(_handle);
}

- (void)dealloc {
  delete static_cast<lapilli::Program *>(_handle);
#if !__has_feature(objc_arc)
  [super dealloc];
#endif
}

- (NSString *)device {
  const auto device = [self program].try_device();
  return device ? text_of(device->name()) : @"";
}

- (NSString *)warning {
  return text_of([self program].warning());
}

- (NSArray<LapilliTensor *> *)forward:(NSArray<LapilliTensor *> *)inputs error:(NSError **)error {
  std::vector<lapilli::Tensor> tensors;
  for (LapilliTensor *input in inputs)
    tensors.push_back([input tensor]);
  auto outputs = [self program].try_run("forward", tensors);
  if (!outputs)
    return told(outputs.error(), error);
  NSMutableArray<LapilliTensor *> *results = [NSMutableArray arrayWithCapacity:outputs->size()];
  for (lapilli::Tensor &output : *outputs)
    [results addObject:AUTORELEASED([[LapilliTensor alloc] initWithTensor:std::move(output)])];
  return results;
}

- (NSArray<NSNumber *> *)predictImage:(void *)imageBuffer error:(NSError **)error {
  LapilliTensor *tensor = [[LapilliTensor fromBlob:imageBuffer
                                            length:1 * 3 * 224 * 224 * sizeof(float)
                                             shape:@[ @1, @3, @224, @224 ]
                                             dtype:LapilliDTypeFloat32
                                             error:error] metal:error];
  if (tensor == nil)
    return nil;
  LapilliTensor *outputTensor = [[[self forward:@[ tensor ] error:error] firstObject] cpu:error];
  return [outputTensor floats:error];
}

@end
