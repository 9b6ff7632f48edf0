// predict PROGRAM IMAGE: what the tutorial's application does, without a screen. IMAGE has 1 x 3 x 224 x 224 floats.
#import "LapilliModule.h"

#include <cstdio>

static int fail(NSError *error) {
  std::printf("error %ld: %s\n", static_cast<long>([error code]), [[error localizedDescription] UTF8String]);
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 3)
    return 2;
  @autoreleasepool {
    NSError *error = nil;
    LapilliModule *module = [[LapilliModule alloc] initWithFileAtPath:[NSString stringWithUTF8String:argv[1]] error:&error];
    if (module == nil)
      return fail(error);
    NSMutableData *image = [NSMutableData dataWithContentsOfFile:[NSString stringWithUTF8String:argv[2]]];
    NSArray<NSNumber *> *outputs = [module predictImage:[image mutableBytes] error:&error];
    if (outputs == nil)
      return fail(error);
    for (NSNumber *output in outputs)
      std::printf("%a\n", [output doubleValue]);

    // The same in steps, and what is refused.
    LapilliTensor *tensor = [LapilliTensor fromData:image shape:@[ @1, @3, @224, @224 ] dtype:LapilliDTypeFloat32 error:&error];
    LapilliTensor *onGPU = [tensor metal:&error];
    LapilliTensor *result = [[module forward:@[ onGPU ] error:&error] firstObject];
    LapilliTensor *back = [result cpu:&error];
    if (back == nil)
      return fail(error);
    const bool same = [[back floats:&error] isEqualToArray:outputs] && [[onGPU data:&error] isEqualToData:image];
    std::printf("%s %d %d %d %d %ld %s %s\n", same ? "same" : "different", [tensor isMetal], [onGPU isMetal], [result isMetal],
                [back isMetal], static_cast<long>([result dtype]), [[[result shape] description] UTF8String],
                [[module device] UTF8String]);
    if ([LapilliTensor fromData:image shape:@[ @7 ] dtype:LapilliDTypeInt8 error:&error] == nil)
      return fail(error);
    char bytes[4] = {};
    if ([LapilliTensor fromBlob:bytes length:3 shape:@[ @1 ] dtype:LapilliDTypeFloat32 error:&error] != nil)
      return 3;
    fail(error);
    if ([module forward:@[ back ] error:&error] != nil)
      return 3;
    fail(error);
    if ([[LapilliModule alloc] initWithFileAtPath:@"/nowhere.lap" error:&error] != nil)
      return 3;
    fail(error);
#if !__has_feature(objc_arc)
    [module release];
#endif
  }
  return 0;
}
