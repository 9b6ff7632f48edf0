// Lapilli for Objective-C and Swift: a program, and tensors on the CPU and on the GPU. docs/apple.md says how to use it.
//
// Methods that can fail return nil and give an NSError of the domain LapilliErrorDomain: its code is a lapilli_status (lapilli.h), its
// description a sentence that says what was given, what is accepted and what to do. In Swift they throw it.
//
// Objects may be used from any threads at the same time; two threads that write the memory of one tensor race as with any memory.

#import <Foundation/Foundation.h>

#ifndef NS_SWIFT_NAME
#define NS_SWIFT_NAME(name)
#endif

NS_ASSUME_NONNULL_BEGIN

extern NSString *const LapilliErrorDomain;

// The values of lapilli_dtype.
typedef NS_ENUM(NSInteger, LapilliDType) {
  LapilliDTypeBool = 0,
  LapilliDTypeUInt8 = 1,
  LapilliDTypeInt8 = 2,
  LapilliDTypeInt16 = 3,
  LapilliDTypeInt32 = 4,
  LapilliDTypeInt64 = 5,
  LapilliDTypeFloat16 = 6,
  LapilliDTypeBFloat16 = 7,
  LapilliDTypeFloat32 = 8,
  LapilliDTypeFloat64 = 9,
};

// A dense row-major tensor, in memory of the CPU or on the GPU.
@interface LapilliTensor : NSObject {
@private
  void *_handle;
}

@property(nonatomic, readonly) NSArray<NSNumber *> *shape;
@property(nonatomic, readonly) LapilliDType dtype;
@property(nonatomic, readonly) BOOL isMetal; // whether it is on the GPU

// Over the caller's memory, as torch::from_blob: nothing is copied, and the memory must stay as long as the tensor is used.
+ (nullable instancetype)fromBlob:(void *)bytes
                           length:(NSUInteger)length
                            shape:(NSArray<NSNumber *> *)shape
                            dtype:(LapilliDType)dtype
                            error:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(init(blob:length:shape:dtype:));

// A copy of bytes.
+ (nullable instancetype)fromData:(NSData *)data
                            shape:(NSArray<NSNumber *> *)shape
                            dtype:(LapilliDType)dtype
                            error:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(init(data:shape:dtype:));

// The tensor on the GPU: a copy, unless it is there already. It is queued, and not waited for.
- (nullable LapilliTensor *)metal:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(metal());

// The tensor on the CPU: a copy, unless it is there already. Waits for the work that makes it.
- (nullable LapilliTensor *)cpu:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(cpu());

// The bytes, from wherever they are.
- (nullable NSData *)data:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(data());

// The elements of a tensor of float32.
- (nullable NSArray<NSNumber *> *)floats:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(floats());

- (instancetype)init NS_UNAVAILABLE;

@end

// A compiled model, loaded on the GPU: a .lap file, or what torch.jit.save and _save_for_lite_interpreter write after
// optimize_for_mobile(backend="metal").
@interface LapilliModule : NSObject {
@private
  void *_handle;
}

@property(nonatomic, readonly) NSString *device;  // its name
@property(nonatomic, readonly) NSString *warning; // what the first-run check found; empty: nothing

// Whether there is a GPU to run on: false where MoltenVK is not in the application.
+ (BOOL)isAvailable;

- (nullable instancetype)initWithFileAtPath:(NSString *)filePath error:(NSError *_Nullable *_Nullable)error;

// firstRun: check once for each file and driver that the GPU computes right (docs/phones.md).
- (nullable instancetype)initWithFileAtPath:(NSString *)filePath
                                   firstRun:(BOOL)firstRun
                                      error:(NSError *_Nullable *_Nullable)error NS_DESIGNATED_INITIALIZER;

// All outputs of the method "forward". With an input on the GPU they stay there, and the work is queued.
- (nullable NSArray<LapilliTensor *> *)forward:(NSArray<LapilliTensor *> *)inputs
                                         error:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(forward(_:));

// The tutorial's: imageBuffer has 1 x 3 x 224 x 224 floats, the result is what the model gives for each class.
- (nullable NSArray<NSNumber *> *)predictImage:(void *)imageBuffer
                                         error:(NSError *_Nullable *_Nullable)error NS_SWIFT_NAME(predict(image:));

- (instancetype)init NS_UNAVAILABLE;

@end

NS_ASSUME_NONNULL_END
