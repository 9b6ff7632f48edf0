// As much of Apple's Foundation as apple/LapilliModule.mm uses, with the nullability and the attributes that Apple's has: so that Clang
// compiles it for Apple's runtime, with reference counts by the compiler, where Apple's headers are not.
#pragma once
#include <objc/objc.h>

#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_UNAVAILABLE __attribute__((unavailable))
#define NS_DESIGNATED_INITIALIZER __attribute__((objc_designated_initializer))
#define NS_SWIFT_NAME(name) __attribute__((swift_name(#name)))
#define NS_ENUM(type, name) enum name : type name; enum name : type

typedef long NSInteger;
typedef unsigned long NSUInteger;

NS_ASSUME_NONNULL_BEGIN

@class NSString;

__attribute__((objc_root_class)) @interface NSObject
+ (instancetype)alloc;
- (instancetype)init NS_DESIGNATED_INITIALIZER;
- (void)dealloc;
@property(readonly, copy) NSString *description;
@end

@interface NSString : NSObject
+ (nullable instancetype)stringWithUTF8String:(const char *)text;
@property(nullable, readonly) const char *UTF8String;
@property(readonly) const char *fileSystemRepresentation;
- (NSString *)stringByAppendingPathComponent:(NSString *)text;
@end

@interface NSNumber : NSObject
+ (NSNumber *)numberWithInt:(int)value;
+ (NSNumber *)numberWithFloat:(float)value;
+ (NSNumber *)numberWithLongLong:(long long)value;
@property(readonly) long long longLongValue;
@end

typedef struct {
  unsigned long state;
  __unsafe_unretained id _Nullable *_Nullable itemsPtr;
  unsigned long *_Nullable mutationsPtr;
  unsigned long extra[5];
} NSFastEnumerationState;

@protocol NSCopying
@end

@interface NSArray<__covariant T> : NSObject
+ (instancetype)array;
+ (instancetype)arrayWithObjects:(const T _Nonnull[_Nonnull])objects count:(NSUInteger)count;
- (T)objectAtIndex:(NSUInteger)index;
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState *)state
                                  objects:(__unsafe_unretained id _Nullable[_Nonnull])objects
                                    count:(NSUInteger)count;
@property(nullable, readonly) T firstObject;
@property(readonly) NSUInteger count;
@end

@interface NSMutableArray<T> : NSArray <T>
+ (instancetype)arrayWithCapacity:(NSUInteger)count;
- (void)addObject:(T)object;
@end

@interface NSDictionary<__covariant K, __covariant V> : NSObject
+ (instancetype)dictionaryWithObjects:(const V _Nonnull[_Nonnull])objects
                              forKeys:(const id<NSCopying> _Nonnull[_Nonnull])keys
                                count:(NSUInteger)count;
@end

@interface NSString (Copying) <NSCopying>
@end

@interface NSData : NSObject
@property(readonly) const void *bytes;
@property(readonly) NSUInteger length;
@end

@interface NSMutableData : NSData
+ (nullable instancetype)dataWithLength:(NSUInteger)length;
@property(readonly) void *mutableBytes;
@end

@interface NSError : NSObject
+ (instancetype)errorWithDomain:(NSString *)domain code:(NSInteger)code userInfo:(nullable NSDictionary<NSString *, id> *)info;
@end

extern NSString *const NSLocalizedDescriptionKey;
enum { NSCachesDirectory = 13, NSUserDomainMask = 1 };
extern NSArray<NSString *> *NSSearchPathForDirectoriesInDomains(NSUInteger directory, NSUInteger domains, BOOL expand);

NS_ASSUME_NONNULL_END
